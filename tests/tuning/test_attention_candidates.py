"""Predicates of attention's configurations, and what they leave to choose from."""

from dataclasses import replace

import pytest

from smkern.kernels.attention.triton_compile import default_config as kernels_default
from smkern.tuning.attention import constraints
from smkern.tuning.attention.select import candidates
from smkern.tuning.attention.shapes import AttentionConfig, Budget
from tests.tuning.attention_steps import DECODE, decode_of, problem_of

PREFILL = replace(DECODE, batch=1, max_q_len=2048, max_tokens=2048, max_total_kv=4096)
MASK, GRID = Budget(16, "mask"), Budget(16, "grid")
HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({}, "decode"),
        ({"max_q_len": 8, "max_tokens": 512}, "decode"),
        ({"batch": 4, "max_q_len": 2048, "max_tokens": 8192}, "prefill"),
        ({"batch": 4, "max_q_len": 512, "max_tokens": 700}, "prefill"),
        ({"max_q_len": 512, "max_tokens": 575}, "mixed"),
    ],
)
def test_paths(changes, path):
    assert constraints.path_of(replace(DECODE, **changes)) == path


@pytest.mark.parametrize(
    ("name", "config", "problem", "budget", "capability"),
    [
        ("serves_kernel", AttentionConfig("cutlass"), problem_of(), MASK, HOPPER),
        ("serves_kernel", AttentionConfig("cuda"), problem_of(), MASK, AMPERE),
        ("serves_kernel", AttentionConfig("cuda"), problem_of(), MASK, (10, 0)),
        ("serves_kernel", AttentionConfig("triton"), problem_of(), MASK, (7, 5)),
        ("serves_head_dim", AttentionConfig("cuda"), problem_of(head_dim=80), MASK, HOPPER),
        ("serves_head_dim", AttentionConfig("triton"), problem_of(head_dim=512), MASK, HOPPER),
        ("serves_dtypes", AttentionConfig("cuda"), problem_of(dtype="fp16"), MASK, HOPPER),
        ("serves_pages", AttentionConfig("cuda"), problem_of(page_size=48), MASK, HOPPER),
        ("has_residency", AttentionConfig("cuda", 2), problem_of(), MASK, HOPPER),
        ("has_residency", AttentionConfig("triton", 2), problem_of(), GRID, HOPPER),
        ("has_teams", AttentionConfig("cuda", teams=4), problem_of(), MASK, HOPPER),
        ("has_teams", AttentionConfig("cuda", teams=0), problem_of(), MASK, HOPPER),
        ("has_teams", AttentionConfig("cuda", teams=2), problem_of(PREFILL), MASK, HOPPER),
        ("has_steps", AttentionConfig("triton", keys=24), problem_of(), MASK, HOPPER),
        ("fits_shared", AttentionConfig("triton", 8, num_stages=9), problem_of(), MASK, HOPPER),
        ("keeps_bits", AttentionConfig("triton", keys=64), problem_of(), MASK, HOPPER),
        ("keeps_bits", AttentionConfig("triton", num_warps=8), problem_of(), MASK, HOPPER),
    ],
)
def test_what_breaks_a_constraint_is_named(name, config, problem, budget, capability):
    assert name in constraints.violations(problem, config, budget, capability)
    assert not constraints.is_legal(problem, config, budget, capability)


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("budget", [MASK, GRID], ids=["mask", "grid"])
@pytest.mark.parametrize("capability", [HOPPER, AMPERE, (8, 6)])
def test_candidates_are_legal_distinct_and_of_the_same_bits(shape, head_dim, budget, capability):
    problem = problem_of(shape, head_dim=head_dim)
    found = [
        config
        for kernel in constraints.AVAILABLE
        for config in candidates(problem, budget, capability, kernel)
    ]
    assert found
    assert len(set(found)) == len(found)
    assert all(constraints.is_legal(problem, config, budget, capability) for config in found)
    assert len({constraints.bits(c) for c in found if c.kernel == "triton"}) == 1
    kernel = constraints.default_kernel(problem, capability)
    assert (kernel == "cuda") == (capability == HOPPER and head_dim != 80)
    assert any(config.kernel == kernel for config in found)
    assert constraints.served_by(problem, budget, capability) == kernel


def test_decode_has_teams_and_prefill_one_configuration():
    decode = candidates(problem_of(), MASK, HOPPER, "cuda")
    assert [config.teams for config in decode] == [1, 2, 3]
    prefill = candidates(problem_of(PREFILL), MASK, HOPPER, "cuda")
    assert prefill == [constraints.CUDA_PREFILL]


@pytest.mark.parametrize("batch", [1, 64, 512])
@pytest.mark.parametrize("length", [128, 4096, 131072])
def test_neither_batch_nor_length_turns_bits(batch, length):
    problem = decode_of(batch, length)
    for kernel in constraints.AVAILABLE:
        config = constraints.default_config(problem, kernel)
        default = constraints.default_config(problem_of(), kernel)
        assert constraints.bits(config) == constraints.bits(default)


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("max_q_len", [1, 8])
@pytest.mark.parametrize("capability", [HOPPER, AMPERE, (12, 0)])
def test_tritons_default_is_its_kernels(shape, head_dim, max_q_len, capability):
    """Decode items beside prefill take the kernel's default: other sums would have other bits."""
    changes = {} if shape is PREFILL else {"max_q_len": max_q_len}
    problem = problem_of(shape, head_dim=head_dim, **changes)
    path = "prefill" if shape is PREFILL else "decode"
    number = 10 * capability[0] + capability[1]
    theirs = kernels_default(problem, path, number)
    assert constraints.default_config(problem, "triton", capability) == theirs


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("num_q_heads", [8, 32, 64, 128])
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_legal_teams_are_what_the_kernel_launches(head_dim, num_q_heads, cache_dtype):
    from smkern.kernels.attention.cuda import variant_of

    problem = problem_of(head_dim=head_dim, num_q_heads=num_q_heads, cache_dtype=cache_dtype)
    for config in candidates(problem, MASK, HOPPER, "cuda"):
        assert variant_of(problem, config, 90).teams == config.teams
