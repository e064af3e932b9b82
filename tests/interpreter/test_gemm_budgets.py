"""The pointer kernel's values at every small budget, interpreted: fp16 and fp32, ragged sizes."""

from __future__ import annotations

import sys
from runpy import run_module

import pytest
import torch
from torch import Tensor

from smkern.examples.interpreted_gemm import gemm
from smkern.kernels.gemm_schedule import MAX_COUNTERS
from smkern.tuning.config import STREAM_K, Budget, GemmConfig

TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-6}


def operands(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + 31 * n + 997 * k)
    a, w = (torch.randn(rows, k, generator=generator).to(dtype) for rows in (m, n))
    return a, w


def relative_error(out: Tensor, a: Tensor, w: Tensor) -> float:
    exact = a.double() @ w.double().T
    return float((out.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("budget", [1, 2, 5, 11, 12, 13, 17])  # of 12 tiles
@pytest.mark.parametrize("split", [1, 3, STREAM_K])
def test_values_at_every_budget(budget: int, split: int) -> None:
    a, w = operands(50, 70, 100, torch.float16)
    config = GemmConfig("pointer", 16, 32, 32, split=split)
    out, ctas = gemm(a, w, config, Budget(budget, "grid"))
    assert relative_error(out, a, w) < TOLERANCE[torch.float16]
    assert ctas <= budget


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 33, 64), (17, 1, 31), (33, 65, 1), (64, 64, 64)])
def test_ragged_sizes(m: int, n: int, k: int, swap: bool, dtype: torch.dtype) -> None:
    a, w = operands(m, n, k, dtype)
    config = GemmConfig("pointer", 16, 32, 32, swap=swap, split=STREAM_K)
    out, _ = gemm(a, w, config, Budget(5, "grid"))
    assert relative_error(out, a, w) < TOLERANCE[dtype]


def test_no_products_are_zeros() -> None:
    a, w = operands(5, 9, 0, torch.float16)
    out, _ = gemm(a, w, GemmConfig("pointer", 16, 16, 32), Budget(4, "grid"))
    assert torch.equal(out, torch.zeros(5, 9, dtype=torch.float16))


def test_whole_loops_have_the_same_bits_at_every_budget() -> None:
    a, w = operands(50, 70, 100, torch.float16)
    config = GemmConfig("pointer", 16, 32, 32)
    first, *others = (gemm(a, w, config, Budget(n, "grid"))[0] for n in (1, 4, 13))
    assert all(torch.equal(first, other) for other in others)


def test_counters_are_zeros_again_for_the_next_launch() -> None:
    a, w = operands(50, 70, 100, torch.float16)
    config = GemmConfig("pointer", 16, 32, 32, split=STREAM_K)
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32)
    first, second = (gemm(a, w, config, Budget(5, "grid"), counters)[0] for _ in range(2))
    assert not counters.any()
    assert torch.equal(first, second)


def test_the_example_reports_every_budget(monkeypatch, capsys) -> None:
    """As `smkern demo` runs it: it fails where a value is wrong or a grid too large."""
    name = "smkern.examples.interpreted_gemm"
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        run_module(name, run_name="__main__")
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all("against fp64" in line for line in lines)
