"""SwiGLU in the GEMM's epilogue, interpreted: budgets, cuts of K, ragged sizes, tensor maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from smkern.kernels.gemm_schedule import MAX_COUNTERS, make_schedule
from smkern.kernels.gemm_triton import gemm_pointer, gemm_tma
from smkern.ops.reference.swiglu import gemm_swiglu as reference
from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig, GemmProblem

TOLERANCE = {torch.float16: 1e-3, torch.float32: 1e-6}


def operands(m: int, inner: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m + 31 * inner + 997 * k)
    a, w = (torch.randn(rows, k, generator=generator) for rows in (m, 2 * inner))
    return a.to(dtype), (w / max(1, k) ** 0.5).to(dtype)


def run(a: Tensor, w: Tensor, config: GemmConfig, num_sms: int, *, maps: bool = False) -> Tensor:
    """The kernel on poisoned memory; the out has poisoned rows and columns beside it."""
    (m, k), n = a.shape, w.shape[0]
    dtype = "fp32" if a.dtype == torch.float32 else "fp16"
    problem = GemmProblem(m, n, k, dtype, Epilogue(swiglu=True), aligned=maps)
    schedule = make_schedule(problem, config, Budget(num_sms, "grid"))
    tile = (config.block_n, config.block_m) if config.swap else (config.block_m, config.block_n)
    x, y = (w, a) if config.swap else (a, w)
    inner, unit = n // 2, 8 if maps else 1
    frame = torch.full((m + 2, inner + 16), torch.nan, dtype=a.dtype)
    partials = torch.full((max(1, schedule.partial_slots) * tile[0] * tile[1],), torch.nan)
    counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32)
    assert schedule.num_ctas <= num_sms
    common = (
        frame[1:, 8:], frame, frame, partials, counters, m, inner // unit,
        frame.stride(0) // unit, 0, schedule.tiles_x, schedule.tiles_y, schedule.k_iters,
        schedule.whole_tiles, schedule.stream_iters, schedule.quantum, schedule.group,
    )  # fmt: skip
    constants = {
        "BLOCK_X": tile[0], "BLOCK_Y": tile[1], "BLOCK_K": config.block_k,
        "STAGES": config.num_stages, "UNIT": unit, "STREAM": config.split != 1,
        "SWAP": config.swap, "BIAS": False, "RESIDUAL": False, "ACT": "swiglu",
    }  # fmt: skip
    if maps:
        boxes = (tile[0] // 2, tile[1]) if config.swap else (tile[0], tile[1] // 2)
        descriptors = [
            TensorDescriptor.from_tensor(side, [rows, config.block_k])
            for side, rows in zip((x, y), boxes, strict=True)
        ]
        gemm_tma[(schedule.num_ctas,)](*descriptors, *common, **constants)
    else:
        gemm_pointer[(schedule.num_ctas,)](x, y, *common, x.stride(0), y.stride(0), k, **constants)
    assert not counters.any(), "counters are left behind"
    inside = torch.zeros_like(frame, dtype=torch.bool)
    inside[1 : m + 1, 8 : inner + 8] = True
    assert frame[~inside].isnan().all(), "wrote outside of out"
    return frame[1 : m + 1, 8 : inner + 8]


def check(out: Tensor, a: Tensor, w: Tensor) -> None:
    exact = reference(a.double(), w.double(), compute_dtype=torch.float64)
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < TOLERANCE[a.dtype]


@pytest.mark.parametrize("budget", [1, 5, 13])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split", [1, 3, STREAM_K])
def test_values_at_every_budget(budget: int, swap: bool, split: int) -> None:
    a, w = operands(50, 36, 100, torch.float16)
    config = GemmConfig("pointer", 16, 32, 32, swap=swap, split=split)
    check(run(a, w, config, budget), a, w)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("m", "inner", "k"), [(1, 17, 64), (17, 1, 31), (33, 33, 1), (64, 32, 64)])
def test_ragged_sizes(m: int, inner: int, k: int, swap: bool, dtype: torch.dtype) -> None:
    a, w = operands(m, inner, k, dtype)
    config = GemmConfig("pointer", 16, 32, 32, swap=swap, split=STREAM_K)
    check(run(a, w, config, 5), a, w)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("split", [1, 2, STREAM_K])
def test_by_tensor_maps(swap: bool, split: int) -> None:
    """Gate boxes that reach into up's rows, up boxes that reach past the end."""
    a, w = operands(20, 40, 96, torch.float16)
    config = GemmConfig("tma", 16, 32, 32, swap=swap, split=split)
    check(run(a, w, config, 5, maps=True), a, w)


def test_whole_loops_have_the_same_bits_at_every_budget() -> None:
    a, w = operands(50, 36, 100, torch.float16)
    config = GemmConfig("pointer", 16, 32, 32)
    first, *others = (run(a, w, config, n) for n in (1, 4, 13))
    assert all(torch.equal(first, other) for other in others)
