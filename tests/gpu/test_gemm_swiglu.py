"""Values of `gemm_swiglu` against float64 in poisoned frames: every kernel, cut of K and budget."""

from __future__ import annotations

import pytest
import torch

import smkern
from smkern.errors import ArgumentError, BudgetError
from smkern.tuning import constraints
from smkern.tuning.config import STREAM_K, Budget, GemmConfig
from tests.gpu.gemm_support import Operands, dispatched, precompile_all, run_config
from tests.gpu.sides import at_most, sides
from tests.gpu.swiglu_support import Case, check, operands

HALF = torch.bfloat16
SHAPES = [
    Case(1, 8, 8), Case(1, 3072, 512), Case(7, 136, 1000), Case(16, 512, 4096), Case(33, 2048, 72),
    Case(64, 520, 2048), Case(77, 392, 520), Case(129, 72, 4104), Case(1000, 264, 264),
    Case(257, 1032, 136), Case(96, 256, 512, spacing=8), Case(96, 256, 512, "fp16"),
    # unaligned shapes and pitches
    Case(1, 1, 1), Case(5, 3, 7), Case(64, 77, 129), Case(131, 255, 511, spacing=3),
    Case(96, 256, 512, spacing=1), Case(33, 130, 1030, "fp16"), Case(40, 12, 64),
]  # fmt: skip
CONFIGS = [
    GemmConfig("ws", 128, 256, 64, 8, 4),
    GemmConfig("ws", 128, 256, 64, 8, 3, split=STREAM_K),
    GemmConfig("ws", 128, 192, 64, 8, 4, split=2),
    GemmConfig("ws", 128, 160, 64, 8, 4, split=STREAM_K),
    GemmConfig("ws", 128, 128, 64, 8, 4, split=4),
    GemmConfig("ws", 128, 96, 64, 4, 4),
    GemmConfig("ws", 256, 128, 64, 8, 4, split=STREAM_K),
    GemmConfig("ws", 64, 64, 64, 4, 6, eager=True),
    GemmConfig("ws", 64, 256, 64, 4, 4, split=3),
    GemmConfig("ws", 16, 128, 128, 4, 5, swap=True, eager=True, split=2),
    GemmConfig("ws", 64, 128, 64, 4, 6, swap=True, split=STREAM_K),
    GemmConfig("ws", 16, 64, 128, 4, 4, swap=True),
    GemmConfig("ws", 48, 64, 64, 4, 6, swap=True, split=5),
    GemmConfig("ws", 80, 128, 64, 4, 4, swap=True),
    GemmConfig("ws", 64, 256, 64, 8, 4, swap=True, split=STREAM_K),
    GemmConfig("ws", 64, 256, 128, 8, 2, swap=True),
    GemmConfig("tma", 128, 256, 64, 8, 3),
    GemmConfig("tma", 64, 64, 64, 4, 4, split=STREAM_K),
    GemmConfig("tma", 16, 128, 128, 4, 4, swap=True, split=5),
    GemmConfig("pointer", 64, 64, 64, 4, 3, split=3),
    GemmConfig("pointer", 32, 128, 64, 4, 3, swap=True, split=STREAM_K),
]
WIDE = Case(300, 520, 1096)
THIN = Case(50, 520, 1096)
BACKENDS = ["tma", "ws", "pointer", "model", "own", None]
PLAIN = [Case(200, 384, 640, dtype) for dtype in ("bf16", "fp16")]


def _name(config: GemmConfig) -> str:
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    return f"{config.kernel}-{tile}-{config.split}" + "-swap" * config.swap


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Everything that these tests dispatch to at the whole device, compiled in parallel."""
    named = [((THIN if c.swap else WIDE).problem, c) for c in CONFIGS]
    tuned = [dispatched(case, "own") for case in SHAPES]
    plain = [dispatched(case, backend) for case in PLAIN for backend in BACKENDS]
    wanted = [*named, *tuned, *plain]
    precompile_all(item for item in wanted if item[1].kernel not in constraints.LIBRARIES)


def run(case: Case, **options) -> Operands:
    x = operands(case)
    got = smkern.gemm_swiglu(x.a, x.w, out=x.out, **options)
    assert got is x.out
    check(case, x, unfused=options.get("backend") in (None, "unfused"))
    return x


@pytest.mark.parametrize("num_sms", [5, 132])
@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_configurations(config, num_sms):
    case = THIN if config.swap else WIDE
    x = operands(case)
    for _ in range(2):
        run_config(case, x, config, Budget(at_most(num_sms), "grid"))
        check(case, x)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case):
    run(case, backend="own")


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_and_dtype(backend, case):
    run(case, backend=backend)


@pytest.mark.parametrize("case", [*PLAIN, Case(1, 1032, 2048), Case(64, 520, 264)], ids=str)
@pytest.mark.parametrize("num_sms", [None, 16])
def test_unfused(case, num_sms):
    for _ in range(2):
        run(case, backend="unfused", num_sms=num_sms)


@pytest.mark.parametrize("num_sms", [1, 2, 7, 16, 59, 100, 131])
def test_budgets_by_the_grid(num_sms):
    run(Case(64, 1024, 1024), num_sms=at_most(num_sms), backend="own")


def test_budgets_by_the_mask():
    for partition in sides():
        with partition:
            run(Case(64, 1024, 1024))
            run(Case(300, 264, 4096), backend="own")
            run(Case(16, 2048, 1024), backend="unfused")
        torch.cuda.synchronize()


@pytest.mark.parametrize("m", [1, 64, 128, 513])
def test_shapes_of_a_model(m):
    """Llama-3.1-8B's: what dispatch picks there, tuned or not."""
    case = Case(m, 14336, 4096)
    x = operands(case)
    with smkern.ladder([16]) as ladder:
        partition = ladder.split(decode=16).decode
        torch.cuda.synchronize()
        with partition:
            smkern.gemm_swiglu(x.a, x.w, out=x.out, static_weights=True)
        partition.synchronize()
        check(case, x, unfused=True)
    smkern.gemm_swiglu(x.a, x.w, out=x.out.fill_(float("nan")))
    check(case, x, unfused=True)


def test_large_gates_do_not_make_nans():
    a = torch.full((4, 64), 16.0, dtype=HALF, device="cuda")
    w = torch.cat([torch.full((8, 64), -16.0), torch.ones(8, 64)]).to(HALF).cuda()
    for backend in ("ws", "tma", "pointer", "unfused"):
        assert (smkern.gemm_swiglu(a, w, backend=backend) == 0).all()
        assert (smkern.gemm_swiglu(-a, w, backend=backend) == -16384.0 * 1024.0).all()


@pytest.mark.parametrize(("m", "inner", "k"), [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_zero_sizes(m, inner, k):
    x = operands(Case(m, inner, k or 8))
    out = smkern.gemm_swiglu(x.a[:, :k], x.w[:, :k])
    assert out.shape == (m, inner)
    assert not out.any()


def test_what_is_refused():
    x = operands(Case())
    x.out.fill_(7.0)
    bad = [
        (ArgumentError, "w_gate_up is on cpu", x.w.cpu(), {}),
        (ArgumentError, "overlaps w_gate_up", x.w, {"out": x.w[:96, :256]}),
        (BudgetError, "above the device", x.w, {"num_sms": 10**6}),
    ]
    for error, words, w, options in bad:
        with pytest.raises(error, match=words):
            smkern.gemm_swiglu(x.a, w, **({"out": x.out} | options))
    torch.cuda.synchronize()
    assert (x.out == 7).all()
