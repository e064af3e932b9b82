"""Operators over rows on a GPU: values, untouched memory, budgets, graphs, bits, overlap."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import smkern
from smkern.device import Budget
from smkern.errors import WarmupError
from smkern.kernels.rows_launch import RowsKernels
from smkern.ops.operator_eager import eager_operator
from smkern.ops.rows.call import AddRmsNorm, Embedding, RmsNorm, numbers_of, problem_of
from smkern.tuning.rows import candidates
from tests.gpu.attention.cases import fresh_seed
from tests.gpu.bits import same_bits
from tests.gpu.gemm_support import capability
from tests.gpu.rows_support import (
    EPS,
    OPERATORS,
    check,
    cloned,
    eps_of,
    make,
    poisoned,
    precompile,
    rows_of,
    run,
    tensors,
)
from tests.gpu.sides import at_most, sides, whole

EACH = pytest.mark.parametrize("op", OPERATORS)
BF16, FP16 = torch.bfloat16, torch.float16
WIDTHS = (1, 100, 1000, 2880, 4096, 5120, 8192, 12288, 16384)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if torch.cuda.is_available():
        kinds = [(op, width, BF16, True) for op in OPERATORS for width in WIDTHS]
        kinds += [(op, 1000, FP16, True) for op in OPERATORS]
        kinds += [(op, width, BF16, False) for op in OPERATORS for width in (4096, 4095, 261)]
        precompile(kinds)


@EACH
@pytest.mark.parametrize("width", WIDTHS)
def test_values(op: str, width: int) -> None:
    for rows in (1, 7, 133):
        run(make(op, rows, width))


@EACH
def test_fp16(op: str) -> None:
    run(make(op, 133, 1000, FP16))


@EACH
@pytest.mark.parametrize("rows", [1, 32, 128, 8192])
def test_contiguous_rows(op: str, rows: int) -> None:
    run(make(op, rows, 4096, pad=0))


@EACH
@pytest.mark.parametrize("num_sms", [1, 7, 48])
def test_any_budget(op: str, num_sms: int) -> None:
    run(make(op, 300, 5120), num_sms=num_sms)


def test_random_sizes() -> None:
    seed = fresh_seed()
    chance = random.Random(seed)
    torch.manual_seed(seed)
    widths = (8, 64, 3584, chance.randrange(1, 16385), 8 * chance.randrange(1, 2049))
    precompile((op, w, BF16, whole) for op in OPERATORS for w in widths for whole in (True, False))
    for op in OPERATORS:
        for width in widths:
            for pad in (0, 24, chance.randrange(1, 8)):
                run(make(op, chance.randrange(0, 400), width, pad=pad))


@EACH
@pytest.mark.parametrize(("width", "pad"), [(4095, 0), (4096, 3), (4096, 8), (261, 3)])
def test_rows_that_are_not_whole_16_bytes(op: str, width: int, pad: int) -> None:
    run(make(op, 37, width, pad=pad))


def test_results_are_made() -> None:
    call = make("add_rms_norm", 5, 4096)
    same = cloned(call)
    out = smkern.add_rms_norm(*call[:3], eps=EPS)
    assert out.is_contiguous()
    check(same, call._replace(out=out))


def test_wide_weights() -> None:
    for op in ("rms_norm", "add_rms_norm"):
        call = make(op, 64, 4096)
        run(call._replace(weight=torch.randn(4096, device="cuda")))


@pytest.mark.parametrize("width", [4096, 5120, 16384])
def test_norms_in_place(width: int) -> None:
    for op in ("rms_norm", "add_rms_norm"):
        call = make(op, 300, width)
        run(call._replace(out=call.x))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_garbage_read_nothing(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, -1, 99, 100, 2**31 - 1, -(2**31), 50], dtype=dtype, device="cuda")
    if dtype is torch.int64:
        ids[1], ids[4] = 2**62, -(2**62)
    run(Embedding(ids, rows_of(100, 4096, BF16), poisoned(7, 4096, BF16)))
    apart = ids.repeat_interleave(3)[::3]
    run(Embedding(apart, rows_of(100, 4096, BF16), poisoned(7, 4096, BF16)))


def test_rows_that_lie_4_gigabytes_apart() -> None:
    step = 1 << 30
    whole = torch.empty(2 * step + 4096, device="cuda", dtype=BF16)
    x = whole.as_strided((3, 4096), (step, 1))
    x.normal_()
    call = RmsNorm(x, torch.randn(4096, device="cuda").to(BF16), EPS, poisoned(3, 4096, BF16))
    before = call._replace(x=x.contiguous())
    smkern.rms_norm(x, call.weight, eps=EPS, out=call.out)
    check(before, call)
    ids = torch.tensor([2, 0, 1], device="cuda")
    assert torch.equal(smkern.embedding(ids, x), before.x[ids])


@EACH
def test_a_rows_bits_are_its_own(op: str) -> None:
    """Each row alone, by every configuration, in other budgets and partitions."""
    call = run(make(op, 40, 5120))
    bits = call.out.clone()
    fresh = make(op, 40, 5120)  # fresh rows of NaN; the inputs are the first call's
    given = cloned(call)._replace(out=fresh.out)
    if op == "add_rms_norm":
        # the first run changed the residual: x of zeros leaves it as it is
        given = given._replace(x=torch.zeros_like(given.x))
        bits = run(given).out.clone()
    problem = problem_of(given, True)
    assert problem is not None
    kernels, stream = RowsKernels(capability()), torch.cuda.current_stream().cuda_stream
    count = eager_operator(OPERATORS[op], 0).streams.budget(stream, 0).num_sms
    for budget in (Budget(count, "mask", True), Budget(at_most(9), "grid", True)):
        for config in candidates(problem, budget):
            given.out.fill_(torch.nan)
            launch = kernels.prepare(problem, config, budget)
            launch(stream, *addresses(given), *numbers_of(given))
            assert same_bits(given.out, bits), (config, budget)
    for row in (0, 17, 39):
        rowed = {name: getattr(given, name)[row : row + 1] for name in one_row(op)}
        alone = given._replace(**rowed, out=poisoned(1, 5120, BF16))
        run(alone)
        assert same_bits(alone.out, bits[row : row + 1])
    for side in sides():
        given.out.fill_(torch.nan)
        torch.cuda.synchronize()
        with side:
            getattr(smkern, op)(*tensors(given), out=given.out, **eps_of(given))
        side.synchronize()
        assert same_bits(given.out, bits)


def one_row(op: str) -> tuple[str, ...]:
    """Arguments that have a row for each of the result's."""
    return {"embedding": ("ids",), "add_rms_norm": ("x", "residual")}.get(op, ("x",))


def addresses(call: Any) -> list[int]:
    return [x.data_ptr() for x in call if isinstance(x, torch.Tensor)]


@EACH
def test_a_graph(op: str) -> None:
    call = run(make(op, 64, 4096))
    before = smkern.counters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(smkern, op)(*tensors(call), out=call.out, **eps_of(call))
    for _ in range(3):
        for x in tensors(make(op, 64, 4096)):
            for mine in tensors(call):
                if mine.shape == x.shape and mine.dtype == x.dtype:
                    mine.copy_(x)
        same = cloned(call)
        call.out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(same, call)
    assert smkern.counters() == before


def test_a_capture_that_would_load_a_kernel_is_refused() -> None:
    call = make("rms_norm", 3, 1304)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmupError, match="once before"), torch.cuda.graph(graph):
        smkern.rms_norm(call.x, call.weight)


def chain(pdl: bool, budget: Budget, rows: int, side: Any = None) -> torch.Tensor:
    """60 norms that each read what the one before wrote, with or without overlap."""
    torch.manual_seed(3)
    call = make("add_rms_norm", rows, 4096, pad=0)
    call = call._replace(out=call.x)
    problem = problem_of(call, True)
    assert problem is not None
    dispatcher = eager_operator(OPERATORS["add_rms_norm"], 0).dispatcher
    config = replace(dispatcher.select(problem, budget), pdl=pdl)
    launch = dispatcher.launch_by(config, problem, budget, False)
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream if side is None else side.raw_stream
    for _ in range(60):
        launch(stream, *addresses(call), *numbers_of(call))
    torch.cuda.synchronize()
    return torch.cat([call.x, call.residual])


@pytest.mark.parametrize("rows", [1, 64, 700])
def test_overlap_changes_no_bits(rows: int) -> None:
    wanted = chain(False, whole(), rows)
    assert same_bits(chain(True, whole(), rows), wanted)
    with smkern.ladder([16]) as ladder:
        side = ladder.split(decode=16).decode
        found = chain(True, Budget(side.num_sms, "mask", side.clusters), rows, side)
        assert same_bits(found, wanted)


def test_overlap_in_a_graph_changes_no_bits() -> None:
    call = make("add_rms_norm", 64, 4096, pad=0)
    call = call._replace(out=call.x)
    same = cloned(call)
    same = same._replace(out=same.x)
    gated = torch.randn(64, 8192, device="cuda").to(BF16)

    def step(x: Any) -> None:
        smkern.add_rms_norm(x.x, x.residual, x.weight, out=x.x)
        smkern.silu_and_mul(gated, out=x.out)
        smkern.rms_norm(x.x, x.weight, out=x.x)

    for _ in range(20):
        step(same)
        torch.cuda.synchronize()  # nothing overlaps
    spare = cloned(call)
    step(spare._replace(out=spare.x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            step(call)
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(call.x, same.x)
    assert same_bits(call.residual, same.residual)


def test_a_warmup_loads_all_that_serving_needs() -> None:
    calls = smkern.RowsCalls(hidden=[1536], added=[1536], gated=[1792], embedded=[1536])
    report = smkern.warmup(calls=[calls], progress=False)
    assert report.launched == 4
    before = smkern.counters()
    for op, width in (("rms_norm", 1536), ("add_rms_norm", 1536), ("silu_and_mul", 1792),
                      ("embedding", 1536)):  # fmt: skip
        for rows in (1, 9, 500):
            for num_sms in (None, 1, 32):
                run(make(op, rows, width), num_sms=num_sms)
    assert smkern.counters() == before


def test_a_residual_of_another_pitch() -> None:
    call = make("add_rms_norm", 50, 4096)
    run(call._replace(residual=rows_of(50, 4096, BF16, 64)))
    wide = rows_of(50, 3 * 4096, BF16, 0)
    parts = wide.split(4096, 1)
    out = poisoned(50, 4096, BF16)
    run(AddRmsNorm(parts[0], parts[2], call.weight, EPS, out))
