"""Plan and attention in one captured graph, replayed with lengths that change in place."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import WarmupError
from tests.gpu.attention.cases import Case, Step, fresh_seed, int32, make_step
from tests.gpu.attention.support import (
    BACKENDS,
    MIXED,
    attend,
    counters_are_zero,
    make_plan,
    poison_partials,
)
from tests.gpu.attention.truth import check
from tests.gpu.gemm_support import Holder, finishes
from tests.gpu.sides import sides, total_sms

DECODE = Case(kv_lens=(1500, 1500, 1500, 1500, 1500))
VERIFY = Case(kv_lens=(1500, 700, 700, 700), q_lens=(8, 8, 8, 8))
CHUNKS = Case(kv_lens=(1500, 700, 700, 700), q_lens=(200, 8, 8, 8), max_q_len=200)
"""The longest that these steps can be: the pages are there, replays use less of them."""
UNSEEN = Case(kv_lens=(20, 30), head_dim=256, q_heads=16, kv_heads=1, dtype="fp16", softcap=3.0)
"""A variant that no other test loads."""

COMPILED = [(case, b) for case in (DECODE, VERIFY, CHUNKS, UNSEEN) for b in (*BACKENDS, None)]


@dataclass(slots=True)
class Replayed:
    """A step whose lengths are set in place, as an engine does between replays."""

    step: Step
    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of(cls, case: Case) -> Replayed:
        step = make_step(case)
        return cls(step, step.keys, step.values)

    def set(self, kv_lens: list[int], q_lens: list[int]) -> None:
        """New lengths, at most those of the case; outputs are poisoned."""
        step, case = self.step, self.step.case
        step.kv_lens.copy_(int32(kv_lens))
        if step.cu_q_lens is not None:
            step.cu_q_lens.copy_(int32([sum(q_lens[:i]) for i in range(len(q_lens) + 1)]))
            step.case = replace(case, kv_lens=tuple(kv_lens), q_lens=tuple(q_lens))
        else:
            step.case = replace(case, kv_lens=tuple(kv_lens))
        step.keys = [x[:n] for x, n in zip(self.keys, kv_lens, strict=True)]
        step.values = [x[:n] for x, n in zip(self.values, kv_lens, strict=True)]
        step.poison_outputs()

    def fill_queries(self) -> None:
        """Random queries in every row of q, those of no request too: which are used changes."""
        self.step.q.normal_()


def lengths(chance: random.Random, case: Case) -> tuple[list[int], list[int]]:
    """Lengths within a case's: often none, one, or all of them."""
    kv_lens = [chance.choice([0, 1, n, chance.randrange(n + 1)]) for n in case.kv_lens]
    q_lens = [chance.choice([0, 1, n, chance.randrange(n + 1)]) for n in case.queries]
    return kv_lens, q_lens if case.q_lens is not None else [1] * case.batch


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [DECODE, VERIFY, CHUNKS], ids=["decode", "verify", "chunks"])
def test_one_graph_serves_changing_lengths(case, backend):
    chance = random.Random(fresh_seed())
    replayed = Replayed.of(case)
    step = replayed.step
    replayed.fill_queries()
    plan = make_plan(step)
    attend(step, plan=plan, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert make_plan(step, out=plan) is plan
        for _ in range(2):  # layers
            attend(step, plan=plan, backend=backend)
    for _ in range(8):
        replayed.set(*lengths(chance, case))
        poison_partials(plan)
        graph.replay()
        check(step)
        assert counters_are_zero(plan)


def test_a_graph_and_an_eager_step_give_the_same_bits():
    chance = random.Random(fresh_seed())
    replayed = Replayed.of(CHUNKS)
    step = replayed.step
    replayed.fill_queries()
    attend(step)
    plan = make_plan(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make_plan(step, out=plan)
        attend(step, plan=plan)
    for _ in range(4):
        replayed.set(*lengths(chance, CHUNKS))
        graph.replay()
        kept = step.out.clone(), step.lse.clone()
        step.poison_outputs()
        attend(step)
        for got, want in zip((step.out, step.lse), kept, strict=True):
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


def test_a_capture_without_a_plan_makes_one_in_the_graph():
    replayed = Replayed.of(DECODE)
    step = replayed.step
    attend(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(step)
    for kv_lens in ([3, 0, 1500, 700, 256], [257, 255, 1, 1, 1499]):
        replayed.set(kv_lens, [1] * 5)
        graph.replay()
        check(step)


def test_graphs_of_partitions():
    for partition in sides():
        replayed = Replayed.of(CHUNKS)
        step = replayed.step
        replayed.fill_queries()
        plan = make_plan(step, num_sms=partition.num_sms)
        torch.cuda.synchronize()  # a partition does not wait for the stream before it
        with partition:
            attend(step, plan=plan)
        partition.synchronize()
        with partition.capture() as graph:
            make_plan(step, out=plan)
            attend(step, plan=plan)
        for kv_lens in ([1500, 0, 40, 700], [200, 8, 700, 1]):
            replayed.set(kv_lens, [200, 1, 8, 5])
            torch.cuda.synchronize()
            partition.launch(graph)
            partition.synchronize()
            check(step)
        graph.close()
        del graph, plan, replayed, step


def test_a_capture_that_would_load_a_kernel_is_refused():
    step = make_step(UNSEEN)
    plan = make_plan(step)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmupError, match=r"smkern.warmup"), torch.cuda.graph(graph):
        attend(step, plan=plan)
    torch.cuda.synchronize()
    attend(step, plan=plan)
    check(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(step, plan=plan)
    step.poison_outputs()
    graph.replay()
    check(step)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "case", [Case(kv_lens=(30_000, 4000, 1, 900)), MIXED], ids=["decode", "mixed"]
)
def test_no_cta_waits_for_another(case, backend):
    """Half the SMs are held; plan and attention for all of them must end on the other half."""
    half = total_sms() // 16 * 8
    holder = Holder()
    step = make_step(case)
    plan = make_plan(step)
    attend(step, plan=plan, backend=backend)
    step.poison_outputs()
    other = torch.cuda.Stream()
    with smkern.ladder([half]) as ladder:
        held = ladder.split(decode=half).decode
        torch.cuda.synchronize()
        with holder.hold(held.stream, half):
            with torch.cuda.stream(other):
                make_plan(step, out=plan)
                attend(step, plan=plan, backend=backend)
            assert finishes(other, 2.0), "the launch waits for CTAs that cannot start"
        check(step)


def test_half_of_a_partitions_own_sms_held():
    """Two ladders overlap on the same SMs; the held ones are half of the launch's own."""
    holder = Holder()
    step = make_step(MIXED)
    plan = make_plan(step, num_sms=32)
    with smkern.ladder([16]) as first, smkern.ladder([32]) as second:
        held, used = first.split(decode=16).decode, second.split(decode=32).decode
        if set(used.smids) <= set(held.smids) or not set(held.smids) & set(used.smids):
            pytest.skip("these two splits do not overlap in part")
        torch.cuda.synchronize()
        with used:
            attend(step, plan=plan)
        used.synchronize()
        step.poison_outputs()
        torch.cuda.synchronize()
        with holder.hold(held.stream, 16):
            with used:
                make_plan(step, out=plan)
                attend(step, plan=plan)
            assert finishes(used.stream, 2.0), "the launch waits for CTAs that cannot start"
        check(step)
