"""GEMMs in CUDA graphs and partitions: counters, first loads, and no waiting for other CTAs."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import smkern
from smkern.ops.gemm.call import Gemm
from smkern.ops.operator_eager import workspaces_of
from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig
from smkern.tuning.constraints import COUNTER_BYTES, LIBRARIES
from tests.gpu.confinement import captured_once_loaded, check_partition_graphs
from tests.gpu.gemm_support import (
    Case,
    Holder,
    Launch,
    check,
    finishes,
    fresh_eager,
    operands,
    precompile_all,
    run_config,
)
from tests.gpu.sides import total_sms

HALF = torch.bfloat16
SLEEP_CYCLES = 6_000_000_000
"""Three seconds and more, where 192 launches take 10 ms."""
SPLIT = Case(8, 64, 16384)
"""Few tiles and a long K: dispatch splits it."""


def _tensors(case: Case):
    x = operands(case)
    return x.a, x.w, torch.empty(case.m, case.n, dtype=HALF, device="cuda")


def test_capture_and_replay_on_an_ordinary_stream():
    a, w, out = _tensors(SPLIT)
    assert smkern.gemm_workspace_bytes(8, 64, 16384) > 0
    want = smkern.gemm(a, w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            smkern.gemm(a, w, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)
    torch.cuda.synchronize()


def test_every_replay_starts_from_zero_counters():
    """A replay that was cut short must not spoil the next one."""
    a, w, out = _tensors(SPLIT)
    want = smkern.gemm(a, w)
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        smkern.gemm(a, w, out=out)
    workspaces = workspaces_of(torch.cuda.current_device())
    buffer = workspaces._of_captures[stream.cuda_stream].tensor
    for _ in range(3):
        buffer[:COUNTER_BYTES].fill_(1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)
        assert not buffer[:COUNTER_BYTES].any()


def test_graphs_of_partitions():
    a, w, _ = _tensors(SPLIT)
    check_partition_graphs(lambda out: smkern.gemm(a, w, out=out))


def test_no_row_count_waits_for_the_device_after_a_warmup():
    """cuBLASLt picks a kernel by M itself, and the first launch of one waits for all before it."""
    n, k, most = 4096, 12288, 256
    rows = range(65, most + 1)
    smkern.warmup(
        shapes=[(n, k)], budgets=[total_sms()], max_m=most, epilogues=["residual"], progress=False
    )
    picked = {smkern.explain_gemm(m, n, k, residual=True).config.kernel for m in rows}
    assert picked.intersection(LIBRARIES)
    x = operands(Case(most, n, k, epilogue=Epilogue(residual=True)))
    smkern.gemm(x.a[:1], x.w, residual=x.residual[:1], out=x.out[:1])
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    slept = torch.cuda.Event()
    slept.record()
    for m in rows:
        smkern.gemm(x.a[:m], x.w, residual=x.residual[:m], out=x.out[:m])
        assert not slept.query(), f"M = {m} waited"


def test_a_capture_that_would_load_a_kernel_is_refused():
    eager = fresh_eager()
    a, w, out = _tensors(Case())
    call = Gemm(a, w, out=out, backend="tma")
    graph = captured_once_loaded(lambda: eager(call))
    want = out.clone()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_warmup_leaves_nothing_to_load():
    case = Case(1, 1032, 2048)
    report = smkern.warmup(shapes=[(case.n, case.k)], budgets=[16, 132], max_m=96, progress=False)
    assert report.variants
    before = smkern.counters()
    for m in range(1, 97):
        a, w, _ = _tensors(Case(m, case.n, case.k))
        a, w = a.contiguous(), w.contiguous()
        smkern.gemm(a, w, num_sms=16, backend="own")
        smkern.gemm(a, w, backend="own")
    assert smkern.counters() == before


CONFIGS = [
    GemmConfig("tma", 64, 64, 64, 4, 4, split=3),
    GemmConfig("ws", 128, 128, 64, 8, 4, split=STREAM_K),
    GemmConfig("pointer", 64, 64, 64, 4, 3, split=STREAM_K),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kernel)
def test_no_cta_waits_for_another(config):
    """Half the SMs are held; a split launch over all of them must end on the other half."""
    case = Case(500, 520, 4096)
    precompile_all([(case.problem, config)])
    total = total_sms()
    half = total // 16 * 8
    holder = Holder()
    x = operands(case)
    run_config(case, x, config, Budget(total, "grid"))
    torch.cuda.synchronize()
    x.out.fill_(float("nan"))
    other = torch.cuda.Stream()
    with smkern.ladder([half]) as ladder:
        split = ladder.split(decode=half)
        launch = Launch(case, x, config, Budget(total, "grid"))
        torch.cuda.synchronize()
        with holder.hold(split.decode.stream, half):
            with torch.cuda.stream(other):
                launch(other.cuda_stream)
            assert finishes(other, 2.0), "the launch waits for CTAs that cannot start"
        check(case, x)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.kernel)
def test_overlapping_partitions_with_half_the_sms_held(config):
    """Two ladders overlap on the same SMs; the held ones are half of the launch's own."""
    case = Case(500, 520, 4096)
    precompile_all([(case.problem, config)])
    holder = Holder()
    x = operands(case)
    run_config(case, x, config, Budget(32, "mask"))
    torch.cuda.synchronize()
    x.out.fill_(float("nan"))
    with smkern.ladder([16]) as first, smkern.ladder([32]) as second:
        held, used = first.split(decode=16).decode, second.split(decode=32).decode
        if set(used.smids) <= set(held.smids) or not set(held.smids) & set(used.smids):
            pytest.skip("these two splits do not overlap in part")
        launch = Launch(case, x, config, Budget(32, "mask"))
        torch.cuda.synchronize()
        with holder.hold(held.stream, 16):
            launch(used.raw_stream)
            assert finishes(used.stream, 2.0), "the launch waits for CTAs that cannot start"
        check(case, x)


@triton.jit
def _add_seven(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 7, mask=at < n)


def test_kernels_first_loaded_in_a_partition_serve_elsewhere():
    """Modules go to the primary context, whatever stream is current when they are loaded."""
    eager = fresh_eager()
    a, w, _ = _tensors(Case())
    numbers = torch.linspace(0.1, 3.0, 1000, device="cuda", dtype=torch.float64)
    counts = torch.zeros(1000, dtype=torch.int32, device="cuda")

    def work():
        _add_seven[(8,)](counts, 1000, BLOCK=128)
        curve = torch.special.bessel_j1(numbers)
        return curve, eager(Gemm(a, w, activation="silu"))

    with smkern.ladder([16]) as ladder:
        split = ladder.split(decode=16)
        results = []
        torch.cuda.synchronize()
        for place in (split.decode, split.prefill, torch.cuda.stream(torch.cuda.Stream())):
            with place:
                results.append([x.cpu() for x in work()])
            torch.cuda.synchronize()
        results.append([x.cpu() for x in work()])
    assert (counts == 28).all()
    for curve, product in results:
        assert torch.equal(curve, results[0][0])
        torch.testing.assert_close(product, results[0][1], rtol=1e-2, atol=1e-2)
