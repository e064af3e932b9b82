"""Kernels of a mixture of experts interpreted, against the plain-torch reference."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from smkern.kernels import grouped_triton, moe_permute_triton, moe_triton
from smkern.kernels.grouped_launch import pointer_constants, pointer_numbers, variant_of
from smkern.kernels.moe_launch import (
    count_constants,
    few_constants,
    many_constants,
    share_of,
    topk_constants,
    unpermute_constants,
)
from smkern.ops.reference import moe as reference
from smkern.tuning.grouped import Budget, GroupedConfig, GroupedProblem, num_ctas
from smkern.tuning.moe import MoeConfig, PermuteProblem, TopkProblem, UnpermuteProblem

NAN = float("nan")
ROUTES = [(37, 128, 8), (8, 5, 2), (9, 6, 3), (1, 60, 4), (5, 16, 1), (3, 8, 8)]
EACH = pytest.mark.parametrize(("tokens", "experts", "top_k"), ROUTES)
WIDTHS = (72, 33)  # rows are read by whole vectors, or not
EACH_MOVED = pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden"),
    [(*route, WIDTHS[at % 2]) for at, route in enumerate(ROUTES)],
)


def chosen(tokens: int, experts: int, top_k: int) -> Tensor:
    """Different experts for each token, some of them none."""
    generator = torch.Generator().manual_seed(0)
    found = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].int()
    if tokens > 4:
        found[1, 0], found[2, -1], found[3, 0] = -1, experts, 1 << 30
    return found


@EACH
@pytest.mark.parametrize(("config", "renormalize"), [(MoeConfig(4), False), (MoeConfig(16), True)])
def test_routing(tokens, experts, top_k, config, renormalize) -> None:
    logits = torch.randn(tokens, experts + 3, generator=torch.Generator().manual_seed(1))
    logits = logits.half()[:, :experts]
    logits[0] = logits[0, 0]  # of equals the lower
    problem = TopkProblem(tokens, experts, top_k, renormalize, "fp16")
    weights = torch.full((tokens, top_k), NAN)
    found = torch.full((tokens, top_k), -7, dtype=torch.int32)
    moe_triton.topk_softmax_rows[(3,)](
        logits, weights, found, logits.stride(0), top_k, top_k, tokens,
        **topk_constants(problem, config), PDL=False,
    )  # fmt: skip
    wanted, indices = reference.topk_softmax(logits, top_k, renormalize=renormalize)
    assert torch.equal(found, indices)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_routing_of_a_row_with_nan() -> None:
    logits = torch.randn(2, 8)
    logits[0, 3] = NAN
    weights, found = torch.zeros(2, 2), torch.full((2, 2), -7, dtype=torch.int32)
    problem = TopkProblem(2, 8, 2, True, "fp32")
    constants = topk_constants(problem, MoeConfig(4))
    moe_triton.topk_softmax_rows[(1,)](logits, weights, found, 8, 2, 2, 2, **constants, PDL=False)
    assert weights[0].isnan().all()
    assert ((found >= 0) & (found < 8)).all()
    assert torch.equal(found[1], logits[1].topk(2).indices.int())


def permute(
    x: Tensor, experts: Tensor, num_experts: int, config: MoeConfig, ctas: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (-1 where nothing was written), offsets and index."""
    tokens, top_k = experts.shape
    hidden = x.shape[1]
    whole = hidden % 8 == 0
    problem = PermuteProblem(tokens, top_k, num_experts, hidden, whole)
    unit = 8 if whole else 1
    rows = torch.full((tokens * top_k, hidden), -1, dtype=torch.int16)
    offsets = torch.full((num_experts + 1,), -9, dtype=torch.int32)
    index = torch.full((tokens * top_k,), -9, dtype=torch.int32)
    words, strides = x.view(torch.int16), (x.stride(0) // unit, hidden // unit)
    if not config.counted:
        moe_permute_triton.permute_few[(ctas,)](
            words, experts, rows, offsets, index, *strides, tokens, num_experts, hidden // unit,
            **few_constants(problem, config), PDL=False,
        )  # fmt: skip
        return rows, offsets, index
    counted = count_constants(problem) | {"COUNTED": 16}
    counts = torch.full((-(-problem.choices // 16), counted["PAD"]), -5, dtype=torch.int32)
    moe_permute_triton.count_experts[(2,)](
        experts, counts, problem.choices, num_experts, **counted, PDL=False
    )
    moe_permute_triton.permute_many[(ctas,)](
        words, experts, counts, rows, offsets, index, *strides, tokens,
        share_of(problem, config, ctas), num_experts, hidden // unit,
        **(many_constants(problem, config) | {"COUNTED": 16}), PDL=False,
    )  # fmt: skip
    return rows, offsets, index


@EACH_MOVED
@pytest.mark.parametrize("counted", [False, True])
def test_permutation(tokens: int, experts: int, top_k: int, hidden: int, counted: bool) -> None:
    x = torch.randn(tokens, hidden).half()
    picked = chosen(tokens, experts, top_k)
    wanted = reference.moe_permute(x, picked, experts)
    known = int(wanted[1][-1])
    for warps, ctas in ((4, 3), (16, 1), (4, 13)):
        got = permute(x, picked, experts, MoeConfig(warps, counted=counted), ctas)
        assert torch.equal(got[1], wanted[1])
        assert torch.equal(got[2], wanted[2])
        assert torch.equal(got[0][:known], wanted[0].view(torch.int16)[:known])
        assert (got[0][known:] == -1).all()


@pytest.mark.parametrize("counted", [False, True])
def test_all_choices_of_one_expert(counted: bool) -> None:
    x = torch.randn(40, 64).half()
    picked = torch.full((40, 2), 5, dtype=torch.int32)
    rows, offsets, index = permute(x, picked, 8, MoeConfig(4, counted=counted), 4)
    assert offsets.tolist() == [0] * 6 + [80] * 3
    assert index.tolist() == list(range(80))
    assert torch.equal(rows, x.view(torch.int16).repeat_interleave(2, 0))


@EACH_MOVED
@pytest.mark.parametrize("residual", [False, True])
def test_unpermutation(tokens: int, experts: int, top_k: int, residual: bool, hidden: int) -> None:
    _, index = reference.places(chosen(tokens, experts, top_k), experts)
    y = torch.randn(tokens * top_k - 1, hidden).half()  # the last index may be no row
    weights = torch.rand(tokens, top_k + 2)[:, :top_k]
    given = torch.randn(tokens, hidden).half() if residual else None
    wanted = reference.moe_unpermute(y, index, weights, residual=given, compute_dtype=torch.float64)
    unit = 8 if hidden % 8 == 0 else 1
    for warps in (4, 16):
        out = torch.full((tokens, hidden), NAN).half()
        problem = UnpermuteProblem(tokens, top_k, hidden, residual, "fp16", unit == 8)
        step = hidden // unit
        moe_triton.unpermute_rows[(3,)](
            y, index, weights, y if given is None else given, out, step, weights.stride(0), step,
            step, tokens, y.shape[0], step, **unpermute_constants(problem, MoeConfig(warps)),
            PDL=False,
        )  # fmt: skip
        torch.testing.assert_close(out, wanted, rtol=2e-3, atol=2e-3)


def run_grouped(problem: GroupedProblem, num_sms: int, *tensors: Tensor) -> None:
    config = GroupedConfig("pointer", 16, 16, 16, 4, 2)
    variant = variant_of(problem, config, 80)
    grouped_triton.grouped_pointer[(num_ctas(problem, config, Budget(num_sms, "grid")),)](
        *tensors, *pointer_numbers(problem, config, variant.unit), **pointer_constants(variant)
    )


COUNTS: dict[str, tuple[int, ...]] = {
    "even": (4, 4, 4, 4, 4),
    "skewed": (0, 37, 1, 0, 16),
    "one": (0, 0, 0, 0, 33),
    "few": (1, 0, 2, 0, 0),
    "none": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(("n", "k", "num_sms"), [(24, 40, 1), (33, 17, 3)])
def test_grouped_gemm(counts: tuple[int, ...], swiglu: bool, n: int, k: int, num_sms: int) -> None:
    rows = sum(counts) + 3  # rows of no expert stay as they are
    generator = torch.Generator().manual_seed(2)
    a = torch.randn(rows, k, generator=generator).half()
    w = torch.randn(len(counts), n * (1 + swiglu), k, generator=generator).half()
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    a[offsets[-1] :] = NAN
    out = torch.full((rows, n), NAN).half()
    unit = 8 if n % 8 == 0 else 1
    problem = GroupedProblem(
        rows, len(counts), n, k, swiglu, "fp16", unit == 8, k, k, w.stride(0), n
    )
    run_grouped(problem, num_sms, a, w, offsets, out)
    wanted = reference.grouped_gemm(a, w, offsets, swiglu=swiglu)
    wanted[offsets[-1] :] = NAN
    torch.testing.assert_close(out, wanted, rtol=4e-3, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize(
    "offsets", [[0, 5, 3, 9], [-4, 2, 6, 99], [7, 7, 7, 7], [1 << 30, 0, 4, -1]]
)
def test_bad_offsets_stay_inside(offsets: Any) -> None:
    """What they name is cut to the rows that there are; nothing else is read or written."""
    a, w = torch.randn(9, 16).half(), torch.randn(3, 8, 16).half()
    guarded = torch.full((9 + 32, 8), NAN).half()
    given = torch.tensor(offsets).int()
    problem = GroupedProblem(9, 3, 8, 16, False, "fp16", True, 16, 16, 128, 8)
    run_grouped(problem, 1, a, w, given, guarded[16:25])
    assert guarded[:16].isnan().all()
    assert guarded[25:].isnan().all()
    clamped = given.clamp(0, 9).tolist()
    named = {r for lo, hi in pairwise(clamped) for r in range(lo, hi)}
    written = {int(r) for r in (~guarded[16:25].isnan()).any(1).nonzero()}
    assert written == named
