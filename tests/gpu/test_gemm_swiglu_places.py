"""`gemm_swiglu` in partitions, grids and graphs: replayed, overlapped, bit for bit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import smkern
from smkern.ops.swiglu.operator import Swiglu
from smkern.tuning.config import Budget
from tests.gpu.confinement import (
    captured_once_loaded,
    check_dispatched,
    check_partition_graphs,
    check_streams,
)
from tests.gpu.gemm_support import Holder, Launch, finishes
from tests.gpu.gemm_trace import SWIGLU_CASE, SWIGLUS, name_of
from tests.gpu.sides import sides, total_sms
from tests.gpu.swiglu_support import Case, check, fresh_eager, operands

HALF = torch.bfloat16


@pytest.mark.parametrize(("confined", "num_sms"), [("grid", 24), ("mask", 40)])
def test_every_dispatched_grid_is_within_the_budget(confined, num_sms):
    problems = (Case(m, 14336, 4096).problem for m in (1, 64, 300, 1000, 4096))
    check_dispatched(problems, Budget(num_sms, confined))


@pytest.mark.parametrize("config", [SWIGLUS[1], SWIGLUS[4]], ids=name_of)
def test_no_cta_waits_for_another(config):
    """Half the SMs are held; a split launch over all of them must end on the other half."""
    total = total_sms()
    half = total // 16 * 8
    holder, x, other = Holder(), operands(SWIGLU_CASE), torch.cuda.Stream()
    launch = Launch(SWIGLU_CASE, x, config, Budget(total, "grid"))
    with smkern.ladder([half]) as ladder:
        split = ladder.split(decode=half)
        torch.cuda.synchronize()
        with holder.hold(split.decode.stream, half):
            launch(other.cuda_stream)
            assert finishes(other, 2.0), "the launch waits for CTAs that cannot start"
        check(SWIGLU_CASE, x)


@pytest.mark.parametrize("backend", [None, "own", "unfused"])
def test_graphs_of_partitions(backend):
    x = operands(Case(8, 512, 8192))
    check_partition_graphs(lambda out: smkern.gemm_swiglu(x.a, x.w, out=out, backend=backend))


def test_a_capture_that_would_load_a_kernel_is_refused():
    eager = fresh_eager()
    x = operands(Case())
    call = Swiglu(x.a, x.w, backend="tma", out=x.out)
    graph = captured_once_loaded(lambda: eager(call))
    x.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    check(Case(), x)


def test_a_layer_of_overlapping_launches_reads_what_was_written():
    """Each launch fetches its weights early and its rows late: the bits are those of one by one."""
    a = torch.randn(32, 1024, device="cuda").to(HALF)
    gate_up = (torch.randn(8192, 1024, device="cuda") / 320).to(HALF)
    down = (torch.randn(1024, 4096, device="cuda") / 64).to(HALF)

    def chain(promise: bool) -> torch.Tensor:
        x = a.clone()
        inner = torch.empty(32, 4096, dtype=HALF, device="cuda")
        for _ in range(40):
            smkern.gemm_swiglu(x, gate_up, out=inner, static_weights=promise)
            smkern.gemm(inner, down, residual=x, out=x, static_weights=promise)
        return x

    for partition in sides():
        torch.cuda.synchronize()
        with partition:
            want, got = chain(False), chain(True)
        partition.synchronize()
        assert torch.isfinite(want).all()
        assert torch.equal(got, want)
        del want, got


def test_every_batch_and_budget_gives_the_same_bits():
    x = operands(Case(256, 384, 1024))
    a, w = x.a.contiguous(), x.w.contiguous()
    want = smkern.gemm_swiglu(a, w, batch_invariant=True)
    assert torch.isfinite(want).all()
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for m in (1, 2, 8, 17, 64, 77, 128, 200, 256):
        for num_sms in range(8, 133, 12):
            got = smkern.gemm_swiglu(a[:m], w, batch_invariant=True, num_sms=num_sms)
            differ += (got != want[:m]).any()
    order = torch.randperm(256, device="cuda")
    differ += (smkern.gemm_swiglu(a[order], w, batch_invariant=True) != want[order]).any()
    assert int(differ) == 0


def test_kernels_of_a_model_that_has_tuned_cells_give_the_same_bits_too():
    x = operands(Case(128, 14336, 4096))
    want = smkern.gemm_swiglu(x.a, x.w, batch_invariant=True)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    with smkern.ladder([16, 32, 48]) as ladder:
        for side in (side for split in ladder for side in split):
            torch.cuda.synchronize()
            with side:
                for m in (1, 8, 16, 33, 64, 128):
                    got = smkern.gemm_swiglu(x.a[:m], x.w, batch_invariant=True)
                    differ += (got != want[:m]).any()
                    del got
            side.synchronize()
    assert int(differ) == 0


def test_warmup_leaves_nothing_to_load():
    calls = smkern.SwigluCalls(shapes=[(520, 2048)], max_m=96)
    model = smkern.SwigluCalls(shapes=[(14336, 4096)], max_m=128)
    report = smkern.warmup(calls=[calls, model], budgets=[16, 132], progress=False)
    assert report.variants
    before = smkern.counters()
    for m in range(1, 97):
        x = operands(Case(m, 520, 2048))
        smkern.gemm_swiglu(x.a.contiguous(), x.w.contiguous(), num_sms=16, backend="own")
        smkern.gemm_swiglu(x.a.contiguous(), x.w.contiguous())
    w = torch.randn(28672, 4096, device="cuda").to(HALF)
    a = torch.randn(128, 4096, device="cuda").to(HALF)
    with smkern.ladder([16]) as ladder:
        partition = ladder.split(decode=16).decode
        torch.cuda.synchronize()
        with partition:
            for m in range(1, 129):
                smkern.gemm_swiglu(a[:m], w)
        partition.synchronize()
    assert smkern.counters() == before


def test_two_streams_at_once_with_split_k():
    """Each stream has a workspace of its own, gate and up of the unfused path in it."""
    x = operands(Case(8, 64, 16384))
    for backend in ("own", "unfused"):
        call = partial(smkern.gemm_swiglu, x.a, x.w, backend=backend)
        check_streams(call(), lambda out, call=call: call(out=out))
