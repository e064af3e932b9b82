"""What the experts' kernels are given, and what a warmup loads, on a device that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from smkern.errors import ArgumentError, WarmupError
from smkern.kernels.grouped_launch import GroupedKernels
from smkern.kernels.moe_launch import MoeKernels
from smkern.ops.moe.grouped import GROUPED, Grouped
from smkern.ops.moe.permute import PERMUTE, Permute
from smkern.ops.moe.route import TOPK
from smkern.ops.moe.unpermute import UNPERMUTE, Unpermute
from smkern.ops.moe.warmup import MoeCalls
from smkern.ops.operator import Operator
from smkern.ops.operator_warmup import work_of
from smkern.ops.reference import moe as reference
from smkern.ops.warming import Target
from smkern.tuning.config import Budget
from smkern.tuning.grouped import configs_of
from smkern.tuning.moe import PermuteProblem, UnpermuteProblem, candidates
from tests.ops.conftest import memory
from tests.ops.operator_cases import FakeKernels, FakeOperator
from tests.ops.tensors import ints, rows

BF16 = torch.bfloat16
WHOLE = Budget(132, "mask", True)
OFFSETS = torch.tensor([0, 1, 2, 3, 5], dtype=torch.int32)


class MoeFakes(FakeKernels):
    """A family's kernels that work on raw addresses, as theirs would be given them."""

    def __init__(self, op: Operator[Any]) -> None:
        super().__init__()
        self.variants = (GroupedKernels if op is GROUPED else MoeKernels)(90).variants
        self.workspaces: list[int] = []
        runs = {
            "moe_permute": self._permute,
            "moe_unpermute": self._sum,
            "grouped_gemm": self._gemm,
        }
        self._run: Any = runs.get(op.name)

    def launch(self, problem: Any, stream: int, *given: Any) -> None:
        if self._run is not None:
            self._run(problem, *given)

    def _permute(
        self, p: PermuteProblem, x: int, experts: int, rows: int, offsets: int, index: int,
        *rest: int,
    ) -> None:  # fmt: skip
        *room, x_step, rows_step = rest
        self.workspaces += room
        found = reference.moe_permute(
            memory(x, (p.tokens, p.hidden), (x_step, 1), BF16),
            memory(experts, (p.tokens, p.top_k), (p.top_k, 1), torch.int32),
            p.num_experts,
        )
        memory(rows, (p.choices, p.hidden), (rows_step, 1), BF16).copy_(found[0])
        memory(offsets, (p.num_experts + 1,), (1,), torch.int32).copy_(found[1])
        memory(index, (p.choices,), (1,), torch.int32).copy_(found[2])

    def _sum(
        self, p: UnpermuteProblem, y: int, index: int, weights: int, residual: int, out: int,
        y_step: int, residual_step: int, out_step: int, weights_step: int, num_rows: int,
    ) -> None:  # fmt: skip
        shape = (p.tokens, p.hidden)
        added = memory(residual, shape, (residual_step, 1), BF16) if p.residual else None
        found = reference.moe_unpermute(
            memory(y, (num_rows, p.hidden), (y_step, 1), BF16),
            memory(index, (p.tokens * p.top_k,), (1,), torch.int32),
            memory(weights, (p.tokens, p.top_k), (weights_step, 1)),
            residual=added,
        )
        memory(out, shape, (out_step, 1), BF16).copy_(found)

    def _gemm(self, p: Any, a: int, w: int, offsets: int, out: int) -> None:
        found = reference.grouped_gemm(
            memory(a, (p.rows, p.k), (p.a_stride, 1), BF16),
            memory(w, (p.num_experts, p.n * p.halves, p.k), (p.expert_stride, p.w_stride, 1), BF16),
            memory(offsets, (p.num_experts + 1,), (1,), torch.int32),
            swiglu=p.swiglu,
        )
        memory(out, (p.rows, p.n), (p.out_stride, 1), BF16).copy_(found)


def device_of(op: Operator[Any]) -> FakeOperator:
    """One operator on a device that is not there."""

    def select(problem: Any, budget: Budget) -> Any:
        found: Any = configs_of(problem, 90) if op is GROUPED else candidates(problem, budget)
        return found[0]

    return FakeOperator(op, kernels=MoeFakes(op), select=select)


def strided(x: Tensor, pad: int = 8) -> Tensor:
    """The same rows, further apart."""
    wide = torch.full((x.shape[0], x.shape[1] + pad), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@pytest.mark.parametrize("pad", [8, 3])
@pytest.mark.parametrize("tokens", [5, 300])
def test_what_a_permutation_is_given(pad: int, tokens: int) -> None:
    device = device_of(PERMUTE)
    x = strided(rows(tokens), pad)
    experts = torch.rand(tokens, 16).argsort(1)[:, :4].int()
    want = reference.moe_permute(x, experts, 16)
    out = strided(torch.zeros(4 * tokens, 64).to(BF16), pad)
    for given in (None, out):
        found = device.eager(Permute(x, experts, 16, given))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    wanted = PermuteProblem(tokens, 4, 16, 64, aligned=pad == 8)
    assert {problem for problem, *_ in device.kernels.prepared} == {wanted}
    assert len(device.kernels.workspaces) == (2 if tokens == 300 else 0)


@pytest.mark.parametrize("pad", [8, 3])
@pytest.mark.parametrize("residual", [False, True])
def test_what_a_sum_is_given(pad: int, residual: bool) -> None:
    device = device_of(UNPERMUTE)
    y, index = strided(rows(12), pad), torch.randint(-2, 14, (20,)).int()
    weights, added = torch.rand(5, 9)[:, :4], strided(rows(5), 16) if residual else None
    want = reference.moe_unpermute(y, index, weights, residual=added)
    found = device.eager(Unpermute(y, index, weights, added))
    assert torch.equal(found, want)
    if added is not None:
        assert device.eager(Unpermute(y, index, weights, added, added)) is added
        assert torch.equal(added, want)
    wanted = UnpermuteProblem(5, 4, 64, residual, aligned=pad == 8)
    assert device.kernels.prepared[0][0] == wanted


@pytest.mark.parametrize("swiglu", [False, True])
def test_what_a_grouped_gemm_is_given(swiglu: bool) -> None:
    device = device_of(GROUPED)
    a, out = strided(rows(9)), strided(torch.zeros(9, 16).to(BF16))
    offsets = ints(0, 2, 2, 8, 9)
    whole = torch.randn(4, 40, 72).to(BF16)
    columns = 32 if swiglu else 16
    kinds = {
        "dense": (whole.view(-1)[: 4 * columns * 64].view(4, columns, 64), True),
        "rows apart": (whole.view(-1)[: 4 * columns * 72].view(4, columns, 72)[..., :64], True),
        "experts apart": (whole[:, :columns, :64], False),
        "odd": (whole.view(-1)[1:][: 4 * columns * 64].view(4, columns, 64), False),
        "every other": (torch.randn(8, columns, 64).to(BF16)[::2], False),
    }
    for name, (w, aligned) in kinds.items():
        want = reference.grouped_gemm(a, w, offsets, swiglu=swiglu)
        for given in (None, out):
            found = device.eager(Grouped(a, w, offsets, swiglu, out=given))
            assert torch.equal(found, want), name
        assert device.kernels.prepared[-1][0].aligned == aligned, name


def test_check_reads_offsets_before_a_launch_and_not_in_a_capture() -> None:
    device, launched = device_of(GROUPED), []
    device.kernels.prepare = lambda *given: lambda *addresses: launched.append(addresses)
    good = Grouped(rows(6), torch.zeros(4, 32, 64).to(BF16), OFFSETS, check=True)
    bad = good._replace(expert_offsets=ints(0, 2, 1, 3, 5))
    device.eager(good)
    with pytest.raises(ArgumentError, match=r"expert_offsets\[2\] is 1, wanted 2"):
        device.eager(bad)
    assert len(launched) == 1
    device.is_capturing = True
    with pytest.raises(ArgumentError, match="check=True reads device memory"):
        device.eager(good)
    device.eager(bad._replace(check=False))
    assert len(launched) == 2
    assert len(device.eager.records) == 1, "check takes part in the key"


def test_nothing_is_launched_without_rows() -> None:
    device = device_of(GROUPED)
    assert device.eager(Grouped(rows(0), torch.zeros(4, 32, 64).to(BF16), OFFSETS)).shape == (0, 32)
    device = device_of(UNPERMUTE)
    assert device.eager(Unpermute(rows(), ints(), torch.ones(0, 2))).shape == (0, 64)
    assert not device.kernels.prepared
    # offsets are written, whatever there is
    problem = PERMUTE.problem(Permute(rows(0), torch.zeros(0, 2).int(), 4), True)
    assert problem == PermuteProblem(0, 2, 4, 64)


def test_what_only_the_reference_takes() -> None:
    x, w = rows(5, 64, torch.float32), torch.zeros(4, 32, 64)
    for op, call in (
        (PERMUTE, Permute(x, torch.zeros(5, 2).int(), 4)),
        (GROUPED, Grouped(x, w, OFFSETS)),
    ):
        with pytest.raises(ArgumentError, match=r"torch\.float32 on a GPU"):
            op.problem(call, True)


CALLS = MoeCalls(hidden=64, intermediate=24, num_experts=16, top_k=4, dtype=BF16)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("hidden", [64, 60])
def test_calls_after_a_warmup_load_nothing(aligned: bool, hidden: int) -> None:
    calls = replace(CALLS, hidden=hidden)
    target = Target(-1, 132, (WHOLE,), (aligned,))
    devices = {op: device_of(op) for op in (TOPK, PERMUTE, GROUPED, UNPERMUTE)}
    for op, call in calls.calls(torch.device("cpu"), aligned):
        device = devices[op]
        work = work_of(op, [call], target, device.eager)
        assert work.variants == len(work.compile) > 0
        for launch in work.launches:
            launch()
        assert not work_of(op, [call], target, device.eager).compile
    tokens, inner, skip = 77, calls.intermediate, 0 if aligned else 1

    def filled(*shape: int) -> Tensor:
        count = torch.Size(shape).numel()
        return torch.zeros(count + skip).to(BF16)[skip:].view(shape)

    moved, gated = filled(tokens * 4, hidden), filled(tokens * 4, inner)
    offsets, index = torch.zeros(17).int(), torch.zeros(tokens * 4).int()
    later: list[tuple[Operator[Any], Any]] = [
        (PERMUTE, Permute(filled(tokens, hidden), torch.zeros(tokens, 4).int(), 16)),
        (GROUPED, Grouped(moved, filled(16, 2 * inner, hidden), offsets, True)),
        (GROUPED, Grouped(gated, filled(16, hidden, inner), offsets)),
        (UNPERMUTE, Unpermute(moved, index, torch.ones(tokens, 4), filled(tokens, hidden))),
    ]
    for op, call in later:
        devices[op].is_capturing = True
        devices[op].eager(call)
    other = Grouped(gated.half(), filled(16, hidden, inner).half(), offsets)
    with pytest.raises(WarmupError, match="once before"):
        devices[GROUPED].eager(other)


@pytest.mark.parametrize(
    "changed", [{"hidden": 0}, {"intermediate": 0}, {"num_experts": 600}, {"top_k": 17}]
)
def test_calls_that_cannot_be(changed: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(changed))):
        replace(CALLS, **changed)
