"""The Triton attention kernel compiled for devices that are absent: it fits, and spills nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern.device import Confinement
from smkern.errors import DeviceError
from smkern.kernels.attention.merge_triton import MergeVariant
from smkern.kernels.attention.triton_compile import variants_of
from smkern.kernels.compile import Artifact
from smkern.tuning.attention import constraints
from smkern.tuning.attention.select import select_attention
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget
from smkern.tuning.constraints import shared_limit
from tests.kernels.cubins import told, usage
from tests.kernels.devices import profile_of

pytestmark = pytest.mark.slow


def problem(max_q_len: int, *, head_dim: int = 128, group: int = 4, **options) -> AttentionProblem:
    """Of 8 requests with up to 4,096 keys."""
    window = options.pop("window", 0)
    shape = AttentionShape(
        8, 8 * group, 8, head_dim, 16, max_q_len, 4096, 8 * max_q_len, 8 * 4096, True, window
    )
    return AttentionProblem(shape, **options)


def chosen(
    wanted: AttentionProblem, capability: int, confined: Confinement = "mask"
) -> AttentionConfig:
    """What a device's dispatch chooses without a table; on sm_90 where CUDA cannot serve a call."""
    profile, budget = profile_of(capability), Budget(32, confined)
    backend = "triton" if capability == 90 else None
    config = select_attention(wanted, budget, profile, None, backend).config
    assert config.kernel == "triton"
    return config


def compile_chosen(wanted: AttentionProblem, capability: int) -> tuple[Artifact, ...]:
    """By the chosen configuration; its kernels fit, or `compile` raises."""
    return compile_all(wanted, chosen(wanted, capability), capability)


def compile_all(
    wanted: AttentionProblem, config: AttentionConfig, capability: int
) -> tuple[Artifact, ...]:
    return tuple(variant.compile() for variant in variants_of(wanted, config, capability))


@pytest.mark.parametrize("capability", [80, 89, 90, 100])
@pytest.mark.parametrize(
    ("head_dim", "max_q_len"), [(64, 1), (64, 4096), (128, 1), (128, 8), (128, 4096)]
)
def test_what_dispatch_chooses_fits_and_does_not_spill(capability, head_dim, max_q_len, tmp_path):
    wanted = problem(max_q_len, head_dim=head_dim)
    config = chosen(wanted, capability)
    variants = variants_of(wanted, config, capability)
    artifacts = compile_all(wanted, config, capability)
    for variant, artifact in zip(variants, artifacts, strict=True):
        assert artifact.num_threads == 32 * variant.num_warps
        # a few words around the tensor memory of sm_100
        assert usage(artifact, tmp_path)[1] <= (32 if capability == 100 else 0)
    check_residency(wanted, config, capability, artifacts)


def check_residency(wanted, config, capability, artifacts):
    """All CTAs of the first kernel fit an SM at once, in what the rules say that they take."""
    limit, shared = shared_limit(divmod(capability, 10)), artifacts[0].shared_bytes
    assert config.ctas_per_sm * (shared + 1024) <= limit + 1024
    prefill = wanted.shape.has_prefill
    assert shared <= constraints.triton_bytes(wanted, config, prefill, divmod(capability, 10))


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
@pytest.mark.parametrize("max_q_len", [1, 64])
def test_the_widest_heads_fit(capability, max_q_len):
    wanted = problem(max_q_len, head_dim=256)
    config = chosen(wanted, capability)
    check_residency(wanted, config, capability, compile_all(wanted, config, capability))
    alone = chosen(wanted, capability, "grid")
    assert alone == replace(config, ctas_per_sm=1)


OPTIONS = {
    "window": {"window": 100},
    "softcap and sinks": {"softcap": True, "sinks": True},
    "fp8 cache": {"cache_dtype": "fp8"},
    "fp16": {"dtype": "fp16", "cache_dtype": "fp16"},
    "one head": {"group": 1},
    "an odd group": {"group": 5},
    "padded heads": {"head_dim": 96},
    "output in e4m3": {"scaled": True},
    "two heads a scale": {"scaled": True, "head_dim": 64},
    "two scales a head": {"scaled": True, "head_dim": 256},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_compiles(option):
    compile_chosen(problem(64, **OPTIONS[option]), 90)


@pytest.mark.parametrize("capability", [80, 89, 100])
def test_an_fp8_cache_is_read_as_bytes_before_sm_89(capability, tmp_path):
    """What such devices lack is the conversion, not the kernel: bits are widened by hand."""
    wanted = problem(64, cache_dtype="fp8")
    artifacts = compile_chosen(wanted, capability)
    check_residency(wanted, chosen(wanted, capability), capability, artifacts)
    for artifact in artifacts:
        assert ("E4M3" in told(artifact, tmp_path, "-sass")) == (capability >= 89)
        assert usage(artifact, tmp_path)[1] <= 32


def test_strides_that_are_not_whole_compile():
    wanted = problem(64)
    for variant in variants_of(wanted, chosen(wanted, 90), 90, aligned=False):
        assert variant.kv_unit == 1
        assert variant.compile().cubin


def test_pages_are_gathered_by_wide_asynchronous_copies(tmp_path):
    decode, *_ = compile_chosen(problem(1), 90)
    assert "LDGSTS.E.BYPASS.128" in told(decode, tmp_path, "-sass")


def test_prefill_on_sm_90_uses_its_matrix_unit(tmp_path):
    prefill, *_ = compile_chosen(problem(4096), 90)
    assert "HGMMA" in told(prefill, tmp_path, "-sass")


def test_what_does_not_fit_is_refused_with_the_limit():
    wanted = problem(4096, head_dim=256)
    config = AttentionConfig("triton", keys=128, num_warps=8, num_stages=3)
    with pytest.raises(DeviceError, match=r"232448.*fewer stages"):
        compile_all(wanted, config, 90)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_merge_compiles_without_spills(capability, head_dim, tmp_path):
    artifact = MergeVariant(head_dim, "bf16", True, capability).compile()
    assert usage(artifact, tmp_path)[1] == 0
