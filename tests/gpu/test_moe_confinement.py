"""The experts' CTAs stay on their SMs: seen by %smid, by mask and by grid, eagerly and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import smkern
from smkern.device import Budget
from smkern.kernels.grouped_launch import GroupedKernels
from smkern.kernels.moe_launch import MoeKernels
from smkern.ops.moe.grouped import GROUPED, Grouped
from smkern.ops.moe.permute import PERMUTE, Permute
from smkern.ops.moe.route import TOPK, Topk
from smkern.ops.moe.unpermute import UNPERMUTE, Unpermute
from smkern.ops.operator_warmup import aligned
from smkern.ops.reference import moe as reference
from smkern.tuning.grouped import configs_of
from smkern.tuning.moe import MoeConfig
from tests.gpu.attention.support import at_most
from tests.gpu.confinement import check_capped, check_masked, check_replayed
from tests.gpu.gemm_support import Holder, finishes
from tests.gpu.moe_support import BF16, NAN, capability, routed, same_bits
from tests.gpu.operator_trace import Notes

TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 700, 32, 4, 1024, 256
LAUNCHES = {"moe_permute-counted": 2}
"""Launches of one call, each within the budget."""


def call_of(name: str) -> tuple[Any, Any, Any]:
    """An operator, a call of it with poisoned results, and a configuration."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda").to(BF16)
    experts = routed(TOKENS, EXPERTS, TOP_K)
    offsets, index = reference.places(experts, EXPERTS)
    count = TOKENS * TOP_K
    rows = torch.randn(count, HIDDEN, device="cuda").to(BF16)
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    if name == "topk_softmax":
        out = torch.empty_like(weights), torch.empty_like(experts)
        return TOPK, Topk(x[:, :EXPERTS], TOP_K, True, *out), MoeConfig(4, 8)
    if name.startswith("moe_permute"):
        given = (torch.empty_like(y) for y in (rows, offsets, index))
        config = MoeConfig(4, 4, counted=name.endswith("counted"))
        return PERMUTE, Permute(x, experts, EXPERTS, *given), config
    if name == "moe_unpermute":
        call: Any = Unpermute(rows, index, weights, x, torch.empty_like(x))
        return UNPERMUTE, call, MoeConfig(16, 2)
    swiglu = name.endswith("swiglu")
    w = torch.randn(EXPERTS, INNER * (1 + swiglu), HIDDEN, device="cuda").mul_(0.03).to(BF16)
    out = torch.empty(count, INNER, device="cuda", dtype=BF16)
    call = Grouped(rows, w, offsets, swiglu, out)
    problem = GROUPED.problem(call, True)
    assert problem is not None
    # two CTAs an SM, and a large one
    return GROUPED, call, configs_of(problem, capability())[1 if swiglu else -1]


NAMES = ("topk_softmax", "moe_permute", "moe_permute-counted", "moe_unpermute", "grouped_gemm",
         "grouped_gemm-swiglu")  # fmt: skip
EACH = pytest.mark.parametrize("name", NAMES)


class Traced:
    """A call's launch in a budget, leaving counts of CTAs an SM."""

    def __init__(self, name: str, budget: Budget) -> None:
        torch.manual_seed(1)
        self.op, self.call, config = call_of(name)
        self.notes, self.launches = Notes(), LAUNCHES.get(name, 1)
        problem = self.op.problem(self.call, aligned(self.op, self.call))
        kernels: Any = GroupedKernels if self.op is GROUPED else MoeKernels
        with self.notes.compiling():
            self._launch: Callable[..., None] = kernels(capability()).prepare(
                problem, config, budget
            )
        self._scratch = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")
        room = [self._scratch.data_ptr()] if self.op.workspace(problem, budget) else []
        given = [0 if self.call[at] is None else self.call[at].data_ptr() for at in self.op.places]
        self._given = (*given, *room, *self.op.numbers(self.call))
        self._wanted: list[torch.Tensor] = []
        self.reset()

    def reset(self) -> None:
        for x in self.op.results_of(self.call):
            x.fill_(-9 if x.dtype is torch.int32 else NAN)
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        self._launch(stream, *self._given)

    def smids(self) -> Counter[int]:
        return self.notes.smids()

    def check(self) -> None:
        """Every run has the same bits, and the first is right."""
        torch.cuda.synchronize()
        found = [x.clone() for x in self.op.results_of(self.call)]
        if not self._wanted:
            blank = self.call._replace(**dict.fromkeys(self.op.results, None))
            on_host = blank._replace(
                **{n: x.cpu() for n, x in blank._asdict().items() if isinstance(x, torch.Tensor)}
            )
            want = self.op.reference(on_host)
            want = want if isinstance(want, tuple) else (want,)
            for got, x in zip(found, want, strict=True):
                torch.testing.assert_close(got.cpu(), x, rtol=2e-2, atol=2e-2)
            self._wanted = found
        assert all(same_bits(x, y) for x, y in zip(found, self._wanted, strict=True))


@EACH
def test_the_mask_confines_every_cta(ladder, name):
    for decode in (16, 40):
        for partition in ladder.split(decode=decode):
            budget = Budget(partition.num_sms, "mask", partition.clusters)
            check_masked(Traced(name, budget), partition)


@EACH
def test_the_mask_confines_a_replayed_graph(ladder, name):
    partition = ladder.split(decode=16).decode
    check_replayed(Traced(name, Budget(16, "mask", partition.clusters)), partition)


@EACH
@pytest.mark.parametrize("num_sms", [1, 7, 24, 100])
def test_the_grid_caps_the_sms(name, num_sms):
    num_sms = at_most(num_sms)
    run = Traced(name, Budget(num_sms, "grid"))
    check_capped(run, num_sms * run.launches)


def test_a_spinning_neighbour_does_not_hold_it_up(ladder):
    """Every SM outside the partition is taken: what ends can only have run inside."""
    holder = Holder()
    split = ladder.split(decode=40)
    x = torch.randn(TOKENS, HIDDEN, device="cuda").to(BF16)
    w = torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN, device="cuda").to(BF16)

    def layer() -> None:
        weights, experts = smkern.topk_softmax(x[:, :EXPERTS], TOP_K)
        rows, offsets, index = smkern.moe_permute(x, experts, EXPERTS)
        y = smkern.grouped_gemm(rows, w, offsets, swiglu=True)
        smkern.moe_unpermute(y, index, weights, residual=x)

    torch.cuda.synchronize()
    with split.decode:
        layer()
    split.decode.synchronize()
    with holder.hold(split.prefill.stream, split.prefill.num_sms):
        with split.decode:
            layer()
        assert finishes(split.decode.stream, 2.0), "it waits for SMs outside its partition"
