"""CTAs of all operators stay on their SMs, eagerly and in replayed graphs.

Seen by %smid, by mask and by grid.
"""

from __future__ import annotations

import pytest
import torch

from smkern.device import Budget
from tests.gpu import fp8_trace, gemm_trace, traced_calls
from tests.gpu.attention import traced as attention_trace
from tests.gpu.confinement import check_capped, check_masked, check_replayed
from tests.gpu.gemm_support import Holder, finishes
from tests.gpu.sides import at_most
from tests.gpu.traced_calls import CALLS

RUNS = traced_calls.RUNS | gemm_trace.RUNS | fp8_trace.RUNS | attention_trace.RUNS
EACH = pytest.mark.parametrize("traced", RUNS.values(), ids=RUNS)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    gemm_trace.compile_ahead()


@EACH
def test_the_mask_confines_every_cta(ladder, traced):
    for decode in (16, 40):
        for partition in ladder.split(decode=decode):
            check_masked(traced(Budget(partition.num_sms, "mask", partition.clusters)), partition)


@EACH
def test_the_mask_confines_a_replayed_graph(ladder, traced):
    partition = ladder.split(decode=16).decode
    check_replayed(traced(Budget(16, "mask", partition.clusters)), partition)


@EACH
@pytest.mark.parametrize("num_sms", [1, 7, 24, 100])
def test_the_grid_caps_the_sms(traced, num_sms):
    num_sms = at_most(num_sms)
    run = traced(Budget(num_sms, "grid"))
    check_capped(run, num_sms * run.launches + run.plans)


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_a_spinning_neighbour_does_not_hold_it_up(ladder, make):
    """Every SM outside the partition is taken: what ends can only have run inside."""
    holder, split, call = Holder(), ladder.split(decode=40), make()
    torch.cuda.synchronize()
    with split.decode:
        call()
    split.decode.synchronize()
    with holder.hold(split.prefill.stream, split.prefill.num_sms):
        with split.decode:
            call()
        assert finishes(split.decode.stream, 2.0), "it waits for SMs outside its partition"
