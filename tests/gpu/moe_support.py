"""What the tests of a mixture of experts share on a GPU: inputs, the truth, comparisons."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import smkern
from smkern.kernels.grouped_launch import GroupedKernels
from smkern.kernels.moe_launch import MoeKernels
from smkern.ops.reference import moe as reference
from smkern.tuning.grouped import GroupedProblem
from smkern.tuning.moe import MoeProblem
from tests.gpu.bits import same_bits
from tests.gpu.compiling import compile_ahead
from tests.gpu.gemm_support import capability, check_frame, check_near, framed

NAN = float("nan")
BF16, FP16 = torch.bfloat16, torch.float16


def given_of(op: Any, call: Any, problem: Any, scratch: Tensor) -> tuple[Any, ...]:
    """What a launch is given behind the stream; zeroed scratch memory where it needs some."""
    room = [scratch.data_ptr()] if op.workspace and op.workspace(problem) else []
    return (*op.addresses(call), *room, *op.numbers(call))


def precompile(problems: Iterable[MoeProblem | GroupedProblem]) -> None:
    """Compile side by side every kernel of problems' kinds."""
    wanted: list[Any] = []
    for problem in problems:
        kernels: Any = GroupedKernels if isinstance(problem, GroupedProblem) else MoeKernels
        wanted += kernels(capability()).variants(problem)
    compile_ahead(wanted)


def routed(tokens: int, experts: int, top_k: int, seed: int = 0, *, skew: float = 0.0) -> Tensor:
    """Different experts for each token; with `skew` some are far more popular."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator, device="cuda")
    logits += skew * torch.randn(experts, generator=generator, device="cuda")
    return logits.topk(top_k, 1).indices.int()


def check_routing(
    logits: Tensor, top_k: int, weights: Tensor, experts: Tensor, *, renormalize: bool
) -> None:
    """Hold experts and weights against fp64: of experts within rounding either may come first."""
    shares = logits.double().softmax(-1)
    got = shares.gather(1, experts.long())
    assert len({*experts[0].tolist()}) == top_k
    wanted = shares.sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(got, wanted.values[:, :top_k], rtol=2e-6, atol=0)
    same = (experts.long() == wanted.indices[:, :top_k]).double().mean()
    assert same > 0.999 or experts.numel() < 1000, float(same)
    if renormalize:
        got = got / got.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), got, rtol=5e-6, atol=1e-9)


def check_permutation(
    x: Tensor, experts: Tensor, num_experts: int, found: Sequence[Tensor]
) -> None:
    """Rows, offsets and index to the last bit; rows of no choice are as they were (NaN)."""
    rows, offsets, index = (y.cpu() for y in found)
    want = reference.moe_permute(x.cpu(), experts.cpu(), num_experts)
    assert torch.equal(offsets, want[1])
    assert torch.equal(index, want[2])
    known = int(want[1][-1])
    assert same_bits(rows[:known], want[0][:known])
    assert rows[known:].isnan().all()


def permuted(
    x: Tensor, experts: Tensor, num_experts: int, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_permute` into poisoned results, checked, and what lies around the rows too."""
    count = experts.numel()
    rows, frame = framed(count, x.shape[1], x.dtype)
    offsets = torch.full((num_experts + 1,), -9, dtype=torch.int32, device="cuda")
    index = torch.full((count,), -9, dtype=torch.int32, device="cuda")
    given = (rows, offsets, index)
    assert smkern.moe_permute(x, experts, num_experts, out=given, **options)[0] is rows
    torch.cuda.synchronize()
    check_permutation(x, experts, num_experts, given)
    check_frame(frame, rows)
    return given


class Experts:
    """One grouped GEMM: rows in NaNs, weights, offsets, a poisoned result.

    Args:
        counts: Rows of each expert.
        n: Columns of the result.
        k: Of the products.
        swiglu: Whether weights are gate and up rows.
        dtype: Of all.
        padding: Elements that make rows of a and the result no multiple of 16 bytes.
        behind: Rows of no expert at the end.
    """

    def __init__(
        self, counts: Sequence[int], n: int, k: int, swiglu: bool = False,
        dtype: torch.dtype = BF16, padding: int = 0, behind: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator("cuda").manual_seed(seed)
        self.counts, self.swiglu, self.rows = list(counts), swiglu, sum(counts) + behind
        self.a, _ = framed(self.rows, k, dtype, padding)
        self.a.copy_(torch.randn(self.rows, k, device="cuda", generator=generator))
        self.a[sum(counts) :] = NAN
        shape = (len(counts), n * (1 + swiglu), k)
        self.w = torch.randn(shape, device="cuda", generator=generator, dtype=dtype)
        self.offsets = torch.tensor([0, *counts]).cumsum(0).int().cuda()
        self.out, self.frame = framed(self.rows, n, dtype, padding)

    def run(self, **options: Any) -> Tensor:
        """By the public operator into the poisoned result, checked."""
        self.out.fill_(NAN)
        got = smkern.grouped_gemm(
            self.a, self.w, self.offsets, swiglu=self.swiglu, out=self.out, **options
        )
        assert got is self.out
        torch.cuda.synchronize()
        self.check()
        return self.out

    def check(self) -> None:
        """Hold the result against fp64; rows of no expert and what lies around it are NaN."""
        first = 0
        for expert, count in enumerate(self.counts):
            rows = slice(first, first + count)
            first += count
            if count:
                self._check_expert(expert, rows)
        assert self.out[first:].isnan().all(), "a row of no expert was written"
        check_frame(self.frame, self.out)

    def _check_expert(self, expert: int, rows: slice) -> None:
        a, w = self.a[rows].double(), self.w[expert].double()
        want, lost = a @ w.t(), 2**-18 * (a.abs() @ w.abs().t())
        if self.swiglu:
            (gate, up), (gate_lost, up_lost) = want.chunk(2, -1), lost.chunk(2, -1)
            share = torch.sigmoid(gate)
            want = gate * share * up
            # the slope of silu is at most 1.1
            lost = 1.1 * gate_lost * up.abs() + (gate * share).abs() * up_lost
            lost = lost + 4e-6 * want.abs()
        tolerance = 0.52 * torch.finfo(self.out.dtype).eps * want.abs() + lost + 1e-5
        check_near(self.out[rows], want, tolerance, f"expert {expert}")


def random_counts(chance: random.Random, experts: int, rows: int) -> list[int]:
    """Rows of each expert: many without any, a few with most."""
    cuts = sorted(
        chance.choice([0, rows, chance.randrange(rows + 1), chance.randrange(rows + 1)])
        for _ in range(experts - 1)
    )
    return [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
