"""Attention CTAs stay on their SMs: seen by %smid, by mask and by grid, eagerly and replayed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from smkern.tuning.attention.constraints import default_config
from smkern.tuning.attention.shapes import AttentionConfig, Budget
from tests.gpu.attention.cases import Case, Step, make_step
from tests.gpu.attention.support import BACKENDS, attend, make_plan
from tests.gpu.attention.traced import Traced, TracedKernels
from tests.gpu.attention.truth import check
from tests.gpu.gemm_support import Holder, finishes
from tests.gpu.sides import at_most

DECODE = Case(kv_lens=(3000, 1, 700, 2000, 1500, 900))
MIXED = Case(kv_lens=(900, 1, 700, 300, 1500, 64), q_lens=(300, 1, 2, 300, 1, 8))
CASES = pytest.mark.parametrize("case", [DECODE, MIXED], ids=["decode", "mixed"])
KERNELS = pytest.mark.parametrize("kernel", BACKENDS)


@pytest.fixture(scope="module")
def kernels():
    return TracedKernels()


def config_of(kernel: str, step: Step, confined: str) -> AttentionConfig:
    """A kernel's default configuration in a budget that is kept so."""
    config = default_config(step.case.problem, kernel)
    return config if confined == "mask" else replace(config, ctas_per_sm=1)


def traced(kernels, kernel: str, step: Step, budget: Budget) -> Traced:
    return Traced.of(kernels, step, config_of(kernel, step, budget.confined), budget)


def launches(kernel: str, case: Case) -> int:
    """Launches of a step that are of attention's grid: Triton's paths are a kernel each."""
    return 2 if kernel == "triton" and case.shape.has_prefill else 1


def check_seen(seen: Counter[int], inside: set[int], num_sms: int) -> None:
    assert set(seen) <= inside, f"ran on SMs {sorted(set(seen) - inside)}"
    assert len(seen) >= min(num_sms, 8) * 0.5, f"only {len(seen)} of {num_sms} SMs worked"


@KERNELS
@CASES
def test_the_mask_confines_every_cta(kernels, ladder, case, kernel):
    step = make_step(case)
    for decode in (16, 40):
        for partition in ladder.split(decode=decode):
            budget = Budget(partition.num_sms, "mask", partition.clusters)
            run = traced(kernels, kernel, step, budget)
            step.poison_outputs()
            torch.cuda.synchronize()
            run.launch(partition.raw_stream)
            partition.synchronize()
            check_seen(run.smids(), set(partition.smids), partition.num_sms)
            check(step)


@KERNELS
@CASES
def test_the_mask_confines_a_replayed_graph(kernels, ladder, case, kernel):
    step = make_step(case)
    partition = ladder.split(decode=16).decode
    run = traced(kernels, kernel, step, Budget(16, "mask", partition.clusters))
    with partition.capture() as graph:
        run.launch(torch.cuda.current_stream().cuda_stream)
    for _ in range(3):
        step.poison_outputs()
        torch.cuda.synchronize()
        partition.launch(graph)
        partition.synchronize()
        check_seen(run.smids(), set(partition.smids), 16)
        check(step)
    graph.close()


@KERNELS
@CASES
@pytest.mark.parametrize("num_sms", [1, 7, 24, 100])
def test_the_grid_caps_the_sms(kernels, case, kernel, num_sms):
    num_sms = at_most(num_sms)
    step = make_step(case)
    run = traced(kernels, kernel, step, Budget(num_sms, "grid"))
    stream = torch.cuda.current_stream().cuda_stream
    most = launches(kernel, case) * num_sms + 1  # the plan is one CTA
    for _ in range(2):
        step.poison_outputs()
        run.launch(stream)
        assert sum(run.smids().values()) <= most
        check(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.launch(torch.cuda.current_stream().cuda_stream)
    step.poison_outputs()
    graph.replay()
    seen = run.smids()
    assert sum(seen.values()) <= most
    check(step)


@KERNELS
@CASES
def test_a_grid_budget_inside_a_partition(kernels, ladder, case, kernel):
    """Below the partition's count: inside its SMs, and in no more CTAs than the budget."""
    step = make_step(case)
    partition = ladder.split(decode=40).decode
    run = traced(kernels, kernel, step, Budget(24, "grid", partition.clusters))
    run.launch(partition.raw_stream)
    partition.synchronize()
    seen = run.smids()
    check_seen(seen, set(partition.smids), 24)
    assert sum(seen.values()) <= launches(kernel, case) * 24 + 1
    check(step)


@CASES
@pytest.mark.parametrize("num_sms", [None, 24])
def test_a_spinning_neighbour_does_not_hold_a_step_up(ladder, case, num_sms):
    """Every SM outside the partition is taken: what ends can only have run inside."""
    holder = Holder()
    split = ladder.split(decode=40)
    step = make_step(case)
    torch.cuda.synchronize()
    with split.decode:
        plan = make_plan(step, num_sms=num_sms)
        attend(step, plan=plan, num_sms=num_sms)
    split.decode.synchronize()
    step.poison_outputs()
    torch.cuda.synchronize()
    with holder.hold(split.prefill.stream, split.prefill.num_sms):
        with split.decode:
            make_plan(step, out=plan, num_sms=num_sms)
            attend(step, plan=plan, num_sms=num_sms)
        assert finishes(split.decode.stream, 2.0), "the step waits for SMs outside its partition"
    check(step)
    del plan
