"""After a warmup a serving loop finds all that it asks for loaded, on a fake device."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch

import smkern.ops
from smkern.errors import ArgumentError, DeviceError, WarmupError
from smkern.kernels.attention.args import MergeProblem
from smkern.ops.attention.merge import MERGE
from smkern.ops.attention.warmup import AttentionCalls, choices, work_of
from smkern.ops.operator_dispatch import OperatorDispatcher
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.operator_warmup import joined
from smkern.ops.operator_warmup import work_of as operator_work
from smkern.ops.warming import Bar, Target
from smkern.ops.warmup import run_all
from smkern.tuning.attention.key import AttentionKey
from smkern.tuning.attention.select import AttentionTable, reachable, select_attention
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget
from smkern.tuning.cells import Tuned
from tests.ops.attention.cases import FP8, Case, make
from tests.ops.conftest import FakeProfile
from tests.ops.operator_cases import FakeKernels
from tests.ops.tensors import default_dtype, misplaced

pytestmark = pytest.mark.slow

CALLS = AttentionCalls(
    num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16, max_q_len=64, dtype=torch.float16
)
BUDGETS = (Budget(132, "grid", True), Budget(32, "mask", False), Budget(8, "grid", False))
TARGET = Target(-1, 132, BUDGETS, (True,))
STEPS = [
    ((1, 37), (1, 5)),
    ((1, 600),) * 5,
    ((2, 9), (1, 40)),
    ((4, 70),),
    ((8, 8), (3, 11)),
    ((9, 9),),
    ((64, 700), (1, 3), (1, 4)),
]


class FakeMerges(FakeKernels):
    """`MERGE` on the fake device: a variant is what chooses its code."""

    def __init__(self, device):
        super().__init__()
        eager = device.eager
        profile, kernels = eager.dispatcher.profile, lambda: self
        dispatcher = OperatorDispatcher(profile, kernels, lambda problem, budget: None)
        self.eager = EagerOperator(MERGE, -1, dispatcher, eager.streams)

    def variants(self, problem):
        return [problem._replace(states=0, rows=0)]

    def launch(self, problem, stream, *given):
        pass


def works_of(device, merges, calls=CALLS, target=TARGET):
    """What these calls need on a fake device."""
    cpu = torch.device("cpu")
    made = [one for aligned in target.aligned for one in calls.merges(cpu, aligned)]
    merged = [operator_work(op, [call], target, merges.eager) for op, call in made]
    return joined([work_of(device.plans, calls, target), *merged])


def warm(device, merges, calls=CALLS, target=TARGET):
    """What `smkern.warmup` does with these calls, compiling left out."""
    work = works_of(device, merges, calls, target)
    nothing = replace(work, compile=[])
    return work, run_all([nothing], 1, Bar(False), 0.0)


def serve(device, calls=CALLS, **changes):
    """Steps of many shapes in every budget, with and without a plan, inside a capture."""
    device.is_capturing = True
    before = set(device.kernels.loaded)
    for lengths, stream, planned in product(STEPS, (7, 8), (True, False)):
        case = Case(
            lengths=lengths,
            cache_dtype=calls.cache_dtype,
            options={"softcap": 3.0} if calls.softcap else {},
        )
        made = make(case)
        device.stream = stream
        for num_sms in (None, 8):
            plan = None
            if planned:
                plan = device.plan(
                    made.args[4], num_q_heads=4, num_kv_heads=2, head_dim=64, page_size=16,
                    max_kv_len=1024, num_sms=num_sms, cu_q_lens=made.options.get("cu_q_lens"),
                    max_q_len=made.options.get("max_q_len", 1),
                )  # fmt: skip
            options = made.options | changes
            device.attend(*made.args, **options, plan=plan, num_sms=num_sms)
    assert device.kernels.loaded == before


VARIED = [CALLS, replace(CALLS, cache_dtype=FP8), replace(CALLS, softcap=True)]


@pytest.mark.parametrize("calls", VARIED)
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_a_serving_loop_after_a_warmup_loads_nothing(make_device, calls, capability):
    device = make_device(capability, choose=select_attention)
    merges = FakeMerges(device)
    with pytest.raises(WarmupError):
        serve(device, calls)
    device.is_capturing = False
    work, report = warm(device, merges, calls)
    kernels = {name for name, *_ in device.kernels.launches}
    assert kernels == {"plan", "cuda" if capability == (9, 0) else "triton"}
    assert report.launched == len(work.launches)
    assert len(work.compile) == work.variants == len(device.kernels.loaded) + 2
    assert merges.loaded == {MergeProblem(0, 0, 64, "fp16", True)}
    serve(device, calls)


def test_a_second_warmup_has_nothing_to_compile(make_device):
    device = make_device(choose=select_attention)
    merges = FakeMerges(device)
    assert warm(device, merges)[0].compile
    assert not warm(device, merges)[0].compile


def test_tensors_that_are_not_aligned_get_tritons_too(make_device):
    device = make_device(choose=select_attention)
    merges = FakeMerges(device)
    warm(device, merges, target=replace(TARGET, aligned=(True, False)))
    assert {problem.aligned for problem in merges.loaded} == {True, False}
    device.is_capturing = True
    made = make(Case(lengths=((1, 37), (1, 5))))
    q, k_cache, v_cache, *rest = made.args
    apart = torch.zeros(*v_cache.shape[:3], 128, dtype=q.dtype)[..., :64].copy_(v_cache)
    for args in ((q, k_cache, v_cache), (misplaced(q), k_cache, v_cache), (q, k_cache, apart)):
        device.attend(*args, *rest)
    names = [name for name, *_ in device.kernels.launches][-5::2]
    assert names == ["cuda", "triton", "triton"]


def problem(batch, q_len, kv_len):
    shape = AttentionShape(batch, 4, 2, 64, 16, q_len, kv_len, batch * q_len, batch * kv_len)
    return AttentionProblem(shape, "fp16", "fp16")


def table_of(config, budget, *problems):
    return AttentionTable(
        cells={AttentionKey.of(each, budget): Tuned(config, 1.0) for each in problems}
    )


def test_tuned_cells_are_reached(make_device):
    """A table's numbers are warmed whatever batch and lengths their cells are of."""
    deep = AttentionConfig("triton", ctas_per_sm=1, keys=32, num_warps=2, num_stages=3)
    steps = problem(64, 1, 4096), problem(4, 4, 512)
    table = table_of(deep, BUDGETS[1], *steps)
    device = make_device((8, 0), table, select_attention)
    warm(device, FakeMerges(device))
    for step in steps:
        found = select_attention(step, BUDGETS[1], device.dispatcher.profile, table)
        assert (found.source, found.config) == ("table", deep)
        assert device.kernels.is_loaded(step, found.config)


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_every_selection_is_reachable(capability):
    profile = FakeProfile(capability)
    for budget, q_len in product(BUDGETS, (1, 3, 8, 40)):
        listed = set(reachable(problem(1, q_len, 16), budget, profile))
        for batch, kv_len in product((1, 3, 64, 300), (1, 700, 5000)):
            found = select_attention(problem(batch, q_len, kv_len), budget, profile)
            assert found.config in listed


def test_what_is_compiled_elsewhere_can_be_sent_there(make_device):
    device = make_device(choose=select_attention)
    work = works_of(device, FakeMerges(device))
    assert pickle.loads(pickle.dumps(work.compile)) == work.compile
    assert len(set(work.compile)) == len(work.compile)


def test_the_widest_decode_items_are_visited(device):
    widths = [p.shape.decode_rows for p in CALLS.problems()]
    assert widths == [2, 4, 6, 8, 10, 12, 14, 16, 2, 2]
    assert len(replace(CALLS, max_q_len=3).problems()) == 3
    assert len(list(choices(device.dispatcher, replace(CALLS, max_q_len=1), TARGET))) >= 3


BAD = [
    ({"num_q_heads": 5}, "5 query heads over 2 KV heads"),
    ({"head_dim": 80}, "head_dim=80"),
    ({"max_q_len": 0}, "max_q_len=0"),
    ({"max_q_len": 2.5}, r"max_q_len=2\.5"),
    ({"window": 0}, "window=0"),
    ({"dtype": torch.float32}, "q is torch.float32"),
    ({"cache_dtype": torch.bfloat16}, "the cache is torch.bfloat16"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_calls_that_cannot_be(bad, message):
    with pytest.raises(ArgumentError, match=message):
        replace(CALLS, **bad)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so():
    with pytest.raises(DeviceError, match=r"explain_attention tell"):
        smkern.ops.warmup(attention=[CALLS])


def test_operators_that_are_named_need_calls():
    with pytest.raises(ArgumentError, match="0 calls of 'attention' are given"):
        smkern.ops.warmup(["attention"])
    with pytest.raises(ArgumentError, match="1 calls of 'attention' are given"):
        smkern.ops.warmup(["gemm"], shapes=[(8, 8)], attention=[CALLS])


def test_logarithms_of_merges_are_fp32_whatever_the_default_dtype_is():
    with default_dtype(torch.bfloat16):
        ((_, call),) = CALLS.merges(torch.device("cpu"), True)
    assert call.lses.dtype == torch.float32
