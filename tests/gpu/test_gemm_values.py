"""Values against float64 in poisoned frames: epilogues, ragged shapes, dtypes, every kernel."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import smkern
from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig
from tests.gpu.gemm_support import (
    Case,
    Operands,
    check,
    dispatched,
    operands,
    precompile_all,
    run_config,
)
from tests.gpu.sides import at_most, sides

FLAGS, ACTIVATIONS = (False, True), (None, "silu", "gelu")
ALL = [Epilogue(b, r, act) for b in FLAGS for r in FLAGS for act in ACTIVATIONS]
FULL = Epilogue(True, True, "silu")

SHAPES = [
    Case(1, 8, 8), Case(1, 6144, 512), Case(7, 264, 1000), Case(16, 512, 4096), Case(33, 4096, 72),
    Case(64, 1032, 2048), Case(77, 776, 520), Case(129, 136, 4104), Case(1000, 520, 264),
    Case(257, 2056, 136), Case(96, 256, 511),
    # unaligned shapes and pitches
    Case(1, 1, 1), Case(5, 3, 7), Case(64, 77, 129), Case(131, 255, 511, padding=3),
    Case(96, 256, 512, padding=1), Case(33, 130, 1030, "fp16", FULL),
]  # fmt: skip
CONFIGS = [
    GemmConfig("tma", 128, 128, 64, 8, 3, split=1),
    GemmConfig("tma", 128, 128, 64, 8, 3, split=3),
    GemmConfig("tma", 64, 64, 64, 4, 4, split=STREAM_K),
    GemmConfig("tma", 16, 64, 128, 4, 4, swap=True, split=5),
    GemmConfig("tma", 64, 128, 64, 4, 4, swap=True, split=STREAM_K, ctas_per_sm=2),
    GemmConfig("ws", 128, 128, 64, 8, 4, split=1),
    GemmConfig("ws", 128, 256, 64, 8, 3, split=STREAM_K),
    GemmConfig("ws", 128, 128, 64, 8, 4, split=4),
    GemmConfig("ws", 32, 128, 128, 4, 4, swap=True, split=2),
    GemmConfig("pointer", 64, 64, 64, 4, 3, split=1),
    GemmConfig("pointer", 64, 64, 64, 4, 3, split=STREAM_K),
]
BUDGETS = [5, 132]
BACKENDS = ["tma", "ws", "pointer", "model", None]
PLAIN = [Case(200, 384, 640, dtype) for dtype in ("bf16", "fp16")]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Everything that these tests dispatch to at the whole device, compiled in parallel."""
    tuned = [dispatched(case, "own") for case in SHAPES]
    forced = [dispatched(Case(epilogue=e), kernel) for e in ALL for kernel in ("tma", "ws")]
    plain = [dispatched(case, backend) for case in PLAIN for backend in BACKENDS]
    named = [(Case(epilogue=e).problem, c) for c in CONFIGS for e in (Epilogue(), FULL)]
    precompile_all([*tuned, *forced, *plain, *named])


def run(case: Case, **options) -> Operands:
    x = operands(case)
    got = smkern.gemm(
        x.a, x.w, **x.epilogue(), activation=case.epilogue.activation, out=x.out, **options
    )
    assert got is x.out
    check(case, x)
    return x


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case):
    run(case, backend="own")


@pytest.mark.parametrize("backend", ["tma", "ws"])
@pytest.mark.parametrize("epilogue", ALL, ids=lambda e: e.key)
def test_every_epilogue(epilogue, backend):
    run(Case(epilogue=epilogue), backend=backend)


@pytest.mark.parametrize("case", PLAIN, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_and_dtype(backend, case):
    run(case, backend=backend)


@pytest.mark.parametrize("num_sms", BUDGETS)
@pytest.mark.parametrize("epilogue", [Epilogue(), FULL], ids=lambda e: e.key)
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.kernel}-{c.block_m}x{c.block_n}-{c.split}"
)
def test_configurations(config, epilogue, num_sms):
    case = Case(300 if not config.swap else 50, 520, 1096, epilogue=epilogue)
    x = operands(case)
    for _ in range(2):
        run_config(case, x, config, Budget(at_most(num_sms), "grid"))
        check(case, x)


@pytest.mark.parametrize("num_sms", [1, 2, 7, 16, 59, 100, 131])
def test_budgets_by_the_grid(num_sms):
    run(Case(64, 2048, 1024), num_sms=at_most(num_sms), backend="own")


def test_budgets_by_the_mask():
    for partition in sides():
        with partition:
            run(Case(64, 2048, 1024))
            run(Case(300, 520, 4096, epilogue=FULL))
        torch.cuda.synchronize()


def test_large_offsets_do_not_wrap():
    """More than 2^31 elements of out between the first and the last row."""
    case = Case(3, 64, 64)
    x = operands(case)
    wide = torch.empty(2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    out = wide.as_strided((3, 64), (2**30 + 8, 1))
    smkern.gemm(x.a, x.w, out=out)
    check(case, x, out)


def test_out_is_the_residual():
    case = Case(200, 264, 2048, epilogue=Epilogue(residual=True))
    x = operands(case)
    want = smkern.gemm(x.a, x.w, residual=x.residual)
    for backend in ("tma", "ws", "pointer"):
        held = x.residual.clone()
        smkern.gemm(x.a, x.w, residual=held, out=held, backend=backend)
        check(case, x, held)
    assert torch.isfinite(want).all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, 64, 64), (64, 0, 64), (64, 64, 0)])
def test_zero_sizes(m, n, k):
    epilogue = Epilogue(True, True, "silu")
    case = Case(m, n, k, epilogue=epilogue)
    x = operands(case)
    out = smkern.gemm(x.a, x.w, bias=x.bias, residual=x.residual, activation="silu")
    assert out.shape == (m, n)
    if out.numel():
        want = torch.nn.functional.silu(x.bias.float()) + x.residual.float()
        assert torch.equal(out, want.bfloat16())


def test_cublaslt_where_it_may_run():
    for bias, residual in product((False, True), repeat=2):
        epilogue = Epilogue(bias, residual)
        for case in (
            Case(200, 384, 640, epilogue=epilogue),
            Case(77, 136, 1032, epilogue=epilogue),
        ):
            run(case, backend="cublaslt")


@pytest.mark.parametrize("m", [65, 130, 204, 257, 1000])
def test_a_residual_in_place_is_added_once_to_rows_that_two_tiles_read(m):
    """The last row tile of ws begins before its own rows, which it alone stores."""
    generator = torch.Generator("cuda").manual_seed(m)
    a, w, out = (
        torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16, generator=generator)
        for rows, columns in ((m, 520), (776, 520), (m, 776))
    )
    wanted = a.double() @ w.double().T + out.double()
    for backend, num_sms in (("ws", at_most(16)), ("ws", at_most(132)), ("cublaslt", None)):
        given = out.clone()
        smkern.gemm(a, w, residual=given, out=given, backend=backend, num_sms=num_sms)
        error = (given.double() - wanted).abs().max() / wanted.abs().max()
        assert error < 2**-7, f"{m} rows by {backend} on {num_sms} SMs"
