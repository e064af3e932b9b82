"""Kernels over rows in Triton's interpreter against their references."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from smkern.kernels import rows_triton
from smkern.kernels.rows_launch import variant_of
from smkern.ops.reference import rows as reference
from smkern.ops.rows.call import AddRmsNorm, Embedding, RmsNorm, SiluAndMul, numbers_of, problem_of
from smkern.tuning.rows import Budget, RowsConfig, num_ctas, shapes_of

GRID = Budget(3, "grid", True)
MASK = Budget(2, "mask", True)
EPS = 1e-5


def strided(rows: int, cols: int, pad: int = 0, like: float = 1.0) -> torch.Tensor:
    """Random fp16 rows, `pad` elements apart."""
    return (like * torch.randn(rows, cols + pad)).half()[:, :cols]


def poisoned(rows: int, cols: int, pad: int = 0) -> torch.Tensor:
    return torch.full((rows, cols + pad), torch.nan).half()[:, :cols]


def interpret(call: Any, config: RowsConfig | None = None, budget: Budget = GRID) -> int:
    """A call with its result, by the first configuration of its kind or by another; its CTAs."""
    problem = problem_of(call, all(x.data_ptr() % 16 == 0 for x in call if torch.is_tensor(x)))
    assert problem is not None
    config = config or shapes_of(problem)[0]
    addresses = [x for x in call if torch.is_tensor(x)]
    ctas, constants = num_ctas(problem, config, budget), variant_of(problem, config, 80).constants
    kernel = getattr(rows_triton, f"{problem.op}_rows")
    kernel[(ctas,)](*addresses, *numbers_of(call), **constants)
    return ctas


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-3, atol=2e-3)


def norm_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In fp64, rounded once."""
    wide = x.double()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (scaled * weight.double()).to(x.dtype)


@pytest.mark.parametrize("width", [1, 8, 100, 256, 1000, 1280, 2880, 4096, 5120])
@pytest.mark.parametrize("added", [False, True])
def test_norms(width: int, added: bool) -> None:
    x, weight = strided(5, width), torch.randn(width).half()
    out = poisoned(5, width)
    if not added:
        interpret(RmsNorm(x, weight, EPS, out))
        close(out, norm_of(x, weight))
        return
    residual = strided(5, width)
    total = (residual.float() + x.float()).half()
    interpret(AddRmsNorm(x, residual, weight, EPS, out))
    assert torch.equal(residual, total)
    close(out, norm_of(total, weight))


def test_eps_counts_where_rows_are_small() -> None:
    """Squares of some 1e-5, as large as eps."""
    x, weight = strided(5, 100, like=3e-3), torch.randn(100).half()
    out = poisoned(5, 100)
    interpret(RmsNorm(x, weight, EPS, out))
    close(out, norm_of(x, weight))


@pytest.mark.parametrize("width", [1000, 2880, 8192, 16384])
def test_a_rows_bits_are_those_of_every_configuration_and_budget(width: int) -> None:
    x, weight = strided(3, width, like=8.0), torch.randn(width).half()
    problem = problem_of(RmsNorm(x, weight), True)
    assert problem is not None
    found = []
    for config in shapes_of(problem):
        for budget in (GRID, MASK, Budget(1, "grid", True)):
            out = poisoned(3, width)
            interpret(RmsNorm(x, weight, EPS, out), config, budget)
            found.append(out)
    assert len(found) >= 3
    assert all(torch.equal(found[0], out) for out in found)


def test_norms_of_rows_apart_in_place_and_with_wide_weights() -> None:
    x, weight = strided(7, 264, 24), torch.randn(264)
    wanted = norm_of(x, weight)
    out = poisoned(7, 264, 8)
    interpret(RmsNorm(x, weight, EPS, out))
    close(out, wanted)
    assert out._base is not None
    assert out._base[:, 264:].isnan().all()
    residual = torch.zeros(7, 264).half()
    interpret(AddRmsNorm(x, residual, weight, EPS, x))
    close(x, wanted)


@pytest.mark.parametrize(("width", "pad"), [(261, 0), (264, 3), (264, 8)])
def test_rows_that_are_not_whole(width: int, pad: int) -> None:
    x, weight, out = strided(4, width, pad), torch.randn(width).half(), poisoned(4, width, pad)
    problem = problem_of(RmsNorm(x, weight, EPS, out), True)
    assert problem is not None
    assert problem.aligned == (width % 8 == 0 and pad % 8 == 0)
    interpret(RmsNorm(x, weight, EPS, out))
    close(out, norm_of(x, weight))


@pytest.mark.parametrize("width", [1, 40, 1024, 1500, 5000])
def test_silu_and_mul(width: int) -> None:
    x, out = strided(5, 2 * width, like=3.0), poisoned(5, width)
    problem = problem_of(SiluAndMul(x, out), True)
    assert problem is not None
    gate, up = x.double().chunk(2, -1)
    for config in shapes_of(problem):
        out.fill_(torch.nan)
        assert interpret(SiluAndMul(x, out), config) <= GRID.num_sms
        close(out, (gate * torch.sigmoid(gate) * up).half())


@pytest.mark.filterwarnings("ignore:overflow")
def test_silu_of_large_gates() -> None:
    x = torch.tensor([[-60000.0, -100.0, 100.0, 60000.0, 1.0, 1.0, 1.0, 1.0]]).half()
    out = poisoned(1, 4)
    interpret(SiluAndMul(x, out))
    assert out.abs().tolist() == [[0.0, 0.0, 100.0, 60000.0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [5, 256, 1500])
def test_embedding(dtype: torch.dtype, width: int) -> None:
    table = strided(9, width, 8)
    ids = torch.tensor([3, 8, 0, -1, 9, 3, 2**31 - 1, -(2**31)], dtype=dtype)
    out = poisoned(8, width)
    interpret(Embedding(ids, table, out))
    assert torch.equal(out, reference.embedding(ids, table))
    apart = torch.stack([ids, ids + 1], 1)[:, 0]
    again = poisoned(8, width)
    interpret(Embedding(apart, table, again), budget=MASK)
    assert torch.equal(again, out)


def test_ctas() -> None:
    x, weight = strided(3, 256), torch.ones(256).half()
    problem = problem_of(RmsNorm(x, weight), True)
    assert problem is not None
    config = replace(shapes_of(problem)[0], ctas_per_sm=2)
    for budget, wanted in ((GRID, 3), (Budget(2, "grid", True), 2), (Budget(1, "mask", True), 2)):
        assert interpret(RmsNorm(x, weight, EPS, poisoned(3, 256)), config, budget) == wanted
