"""CTAs over rows stay on their SMs: seen by %smid, by mask and by grid, eagerly and replayed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import smkern
from smkern.device import Budget
from smkern.kernels.rows_launch import RowsKernels
from smkern.ops.rows.call import numbers_of, problem_of
from smkern.tuning.rows import RowsConfig
from tests.gpu.attention.support import at_most
from tests.gpu.confinement import check_capped, check_masked, check_replayed
from tests.gpu.gemm_support import Holder, finishes
from tests.gpu.operator_trace import Notes
from tests.gpu.rows_support import OPERATORS, capability, check, cloned, make

EACH = pytest.mark.parametrize("op", OPERATORS)
WIDTH, ROWS = 4096, 700
CONFIGS = {
    "norm": (RowsConfig(4, 1, 4), RowsConfig(8, 1, 4, 2), RowsConfig(16, 1, 1, pdl=False)),
    "other": (RowsConfig(4, 4, 8), RowsConfig(16, 1, 2, pdl=False)),
}


def configs(op: str) -> tuple[RowsConfig, ...]:
    return CONFIGS["norm" if "norm" in op else "other"]


class Traced:
    """A call's launch by a configuration in a budget, leaving counts of CTAs an SM."""

    def __init__(self, op: str, config: RowsConfig, budget: Budget) -> None:
        self.fresh = make(op, ROWS, WIDTH)
        self.call: Any = cloned(self.fresh)
        self.notes = Notes()
        problem = problem_of(self.call, True)
        assert problem is not None
        with self.notes.compiling():
            self._launch = RowsKernels(capability()).prepare(problem, config, budget)
        self._addresses = [x.data_ptr() for x in self.call if isinstance(x, torch.Tensor)]
        torch.cuda.synchronize()

    def reset(self) -> None:
        for x, y in zip(self.call, self.fresh, strict=True):
            if isinstance(x, torch.Tensor):
                x.copy_(y)
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        self._launch(stream, *self._addresses, *numbers_of(self.call))

    def smids(self) -> Counter[int]:
        return self.notes.smids()

    def check(self) -> None:
        check(self.fresh, self.call)


@EACH
def test_the_mask_confines_every_cta(ladder, op):
    for config in configs(op):
        for decode in (16, 40):
            for partition in ladder.split(decode=decode):
                budget = Budget(partition.num_sms, "mask", partition.clusters)
                check_masked(Traced(op, config, budget), partition)


@EACH
def test_the_mask_confines_a_replayed_graph(ladder, op):
    partition = ladder.split(decode=16).decode
    for config in configs(op):
        check_replayed(Traced(op, config, Budget(16, "mask", partition.clusters)), partition)


@EACH
@pytest.mark.parametrize("num_sms", [1, 7, 24, 100])
def test_the_grid_caps_the_sms(op, num_sms):
    num_sms = at_most(num_sms)
    for config in configs(op):
        check_capped(Traced(op, config, Budget(num_sms, "grid")), num_sms)


@EACH
def test_a_spinning_neighbour_does_not_hold_it_up(ladder, op):
    """Every SM outside the partition is taken: what ends can only have run inside."""
    holder = Holder()
    split = ladder.split(decode=40)
    call = make(op, ROWS, WIDTH)
    given = [x for x in call[:-2] if isinstance(x, torch.Tensor)]
    torch.cuda.synchronize()
    with split.decode:
        getattr(smkern, op)(*given, out=call.out)
    split.decode.synchronize()
    with holder.hold(split.prefill.stream, split.prefill.num_sms):
        with split.decode:
            getattr(smkern, op)(*given, out=call.out)
        assert finishes(split.decode.stream, 2.0), "it waits for SMs outside its partition"
