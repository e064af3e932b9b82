"""Kernels of a mixture of experts compiled for devices that are absent: no spills, wide moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smkern.kernels import moe_permute_triton, moe_triton
from smkern.kernels.moe_launch import (
    _SIGNATURES,
    MoeKernels,
    MoeVariant,
    share_of,
    variants_of,
    workspace_bytes,
)
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.moe import (
    COUNTED,
    Budget,
    MoeConfig,
    PermuteProblem,
    TopkProblem,
    UnpermuteProblem,
    candidates,
    group_tokens,
)
from tests.kernels.cubins import layouts_summed, sass, usage, waits_first

pytestmark = pytest.mark.slow

TOPK = TopkProblem(64, 128, 8)
PERMUTE = PermuteProblem(512, 8, 128, 2048)
UNPERMUTE = UnpermuteProblem(64, 8, 2048, residual=True)
PROBLEMS: dict[str, Any] = {
    "topk": TOPK,
    "topk-fp32": replace(TOPK, dtype="fp32", renormalize=False),
    "topk-512": replace(TOPK, num_experts=512, top_k=10),
    "topk-few": replace(TOPK, num_experts=6, top_k=2),
    "permute": PERMUTE,
    "permute-512": replace(PERMUTE, num_experts=512, top_k=10),
    "permute-few": PermuteProblem(64, 2, 8, 4096),
    "permute-one": PermuteProblem(64, 1, 16, 1024),
    "permute-odd": PermuteProblem(64, 2, 8, 4095, aligned=False),
    "unpermute": UNPERMUTE,
    "unpermute-odd": UnpermuteProblem(64, 6, 2047, dtype="fp16", aligned=False),
    "unpermute-many": UnpermuteProblem(64, 32, 2048),
}
EACH = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


@pytest.mark.parametrize("kernel", _SIGNATURES)
def test_parameters_are_packed_in_the_kernels_order(kernel: Any) -> None:
    room = moe_triton if hasattr(moe_triton, kernel) else moe_permute_triton
    variants = {x.kernel: x for p in PROBLEMS.values() for x in MoeKernels(90).variants(p)}
    variant: MoeVariant = variants[kernel]
    names = [name for name, _ in _SIGNATURES[kernel]]
    assert getattr(room, kernel).arg_names == [*names, *dict(variant.constants), "PDL"]
    assert len(variant.format) == len(names)


@EACH
def test_no_kernel_spills_and_all_wait(problem: Any, tmp_path: Path) -> None:
    variants = [*MoeKernels(90).variants(problem)]
    artifacts = [variant.compile() for variant in variants]
    codes = sass(artifacts, tmp_path)
    for variant, artifact, code in zip(variants, artifacts, codes, strict=True):
        found, stack = usage(artifact, tmp_path)
        assert stack == 0, variant
        assert found * artifact.num_threads <= 65_536
        assert waits_first(code), variant
        if variant.aligned and variant.num_warps == 4:
            assert "STG.E.128" in code
            assert "LDG.E.128" in code


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_devices(capability: int, tmp_path: Path) -> None:
    for problem in (TOPK, PERMUTE, UNPERMUTE):
        for variant in MoeKernels(capability).variants(problem):
            assert usage(variant.compile(), tmp_path)[1] <= 32


@pytest.mark.parametrize("problem", [TOPK, PROBLEMS["topk-512"], PROBLEMS["topk-few"]])
def test_a_row_is_summed_in_one_order_whatever_the_cta(problem, monkeypatch) -> None:
    """Lanes and elements of a row are dealt alike, or its bits would depend on the budget."""
    layouts = layouts_summed(monkeypatch, r"[\dx]+")
    for variant in MoeKernels(90).variants(problem):
        variant.compile()
    assert len(layouts) <= 2, layouts  # of the experts, and of the chosen


@pytest.mark.parametrize("problem", [TOPK, PERMUTE, UNPERMUTE])
def test_candidates_are_resident_at_once(problem: Any, tmp_path: Path) -> None:
    """CTAs that an SM cannot hold would run one after the other."""
    for config in candidates(problem, Budget(132, "mask")):
        for variant in variants_of(problem, config, 90):
            artifact = variant.compile()
            registers = usage(artifact, tmp_path)[0] * artifact.num_threads
            assert registers * config.ctas_per_sm <= 65_536, (config, variant)


def test_a_variant_holds_nothing_of_budgets_and_tokens() -> None:
    for problem in (TOPK, PERMUTE, UNPERMUTE):
        wanted = MoeKernels(90).variants(problem)
        assert MoeKernels(90).variants(replace(problem, tokens=9000)) == wanted
        few = MoeConfig(4, ctas_per_sm=1, pdl=False)
        assert variants_of(problem, few, 90) == variants_of(problem, MoeConfig(4, 8), 90)


@pytest.mark.parametrize("tokens", [130, 1023, 1025, 8192])
@pytest.mark.parametrize("ctas", [1, 7, 132, 528])
def test_counted_tokens_are_dealt_once(tokens: int, ctas: int) -> None:
    problem, config = replace(PERMUTE, tokens=tokens), MoeConfig(4, counted=True)
    share = share_of(problem, config, ctas)
    assert share % group_tokens(problem, config) == 0
    assert share * ctas >= tokens
    blocks = -(-problem.choices // COUNTED)
    assert workspace_bytes(problem) == COUNTER_BYTES + 4 * blocks * 128


def test_few_choices_need_no_workspace() -> None:
    assert workspace_bytes(replace(PERMUTE, tokens=128)) == 0
    assert workspace_bytes(TOPK) == workspace_bytes(UNPERMUTE) == 0
