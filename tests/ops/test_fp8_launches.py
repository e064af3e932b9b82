"""Eager calls on e4m3 on a driver that does nothing: a launch has every parameter in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from smkern.errors import ArgumentError, DeviceError, WarmupError
from smkern.kernels.cute import compile as cute
from smkern.kernels.fp8 import gemm_compile
from smkern.kernels.fp8.gemm_launch import ScaledGemmKernels
from smkern.kernels.fp8.grouped_launch import ScaledGroupedKernels
from smkern.kernels.fp8.rows_launch import PARAMETERS, QuantKernels
from smkern.kernels.gemm_schedule import make_schedule
from smkern.ops.fp8.call import QuantizedSwiglu, ScaledGemm, ScaledGrouped
from smkern.ops.fp8.dispatch import ScaledDispatcher
from smkern.ops.fp8.gemm import SCALED_GEMM
from smkern.ops.fp8.grouped import SCALED_GROUPED
from smkern.ops.fp8.quantize import QUANTIZE, QUANTIZE_BY, Quantize, QuantizeBy
from smkern.ops.fp8.rows import (
    SCALED_ADD_RMS_NORM,
    SCALED_SILU_AND_MUL,
    ScaledAddRmsNorm,
    ScaledSiluAndMul,
)
from smkern.ops.fp8.swiglu import QUANTIZED_SWIGLU
from smkern.ops.operator_dispatch import OperatorDispatcher
from smkern.tuning import fp8, fp8_grouped, fp8_rows
from smkern.tuning.config import Budget, GemmConfig
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.fp8_grouped import ScaledGroupedProblem
from smkern.tuning.fp8_table import ScaledKey, ScaledTable
from smkern.tuning.table import Cell
from tests.extras import set_cutlass
from tests.ops.fake_layer import Launched
from tests.ops.fp8_launches import (
    BUDGET,
    CUTLASS,
    E4M3,
    GATED,
    GROUPED_POINTER,
    GROUPED_WS,
    H200,
    WS,
    gemms,
    named,
    recorded,
    rows,
    run,
)
from tests.ops.tensors import ints


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    with recorded() as found:
        yield found


@pytest.mark.parametrize("m", [5, 70, 4096])
def test_a_product_of_blocks(m, launched):
    n, k = 6144, 4096
    a, w = rows(m, k, k + 32), rows(n, k, k)
    a_scale, w_scale = torch.ones(32, m).t(), torch.ones(48, 32)
    call = ScaledGemm(a, w, a_scale, w_scale, residual=torch.zeros(m, n + 8).bfloat16()[:, :n])
    dispatcher = gemms()
    out = run(SCALED_GEMM, call, dispatcher)
    assert out.shape == (m, n)
    assert out.dtype is torch.bfloat16
    problem = ScaledProblem(m, n, k, scales="block", epilogue=fp8.Epilogue(residual=True))
    config = dispatcher.select(problem, BUDGET)
    schedule = make_schedule(problem.twin, config, BUDGET)
    found = named(launched[-1], WS)
    assert launched[-1].num_ctas == schedule.num_ctas
    assert found["k_iters"] == 32
    wanted = {
        "m": m, "n": n // 8, "out_stride": n // 8, "residual_stride": n // 8 + 1, "a_step": 1,
        "a_block_step": m, "w_step": 32, "tiles_x": schedule.tiles_x, "tiles_y": schedule.tiles_y,
        "early": 0, "bias": 0,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_a_product_by_cutlass(launched, monkeypatch):
    set_cutlass(monkeypatch, True)
    m, n, k = 50, 6144, 4096
    a, w = rows(m, k, k + 32), rows(n, k, k)
    a_scale, w_scale = torch.ones(m, 32), torch.ones(48, 32)
    given = ScaledGemm(a, w, a_scale, w_scale, residual=torch.zeros(m, n + 8).bfloat16()[:, :n])
    call = given._replace(backend="cutlass", static_weights=True)
    dispatcher = gemms()
    run(SCALED_GEMM, call, dispatcher)
    problem = ScaledProblem(m, n, k, scales="block", epilogue=fp8.Epilogue(residual=True))
    config = dispatcher.select(replace(problem, kernel="cutlass"), BUDGET)
    assert config.kernel == "cutlass"
    schedule = make_schedule(problem.twin, config, BUDGET)
    assert len(launched[-1].values) == len(CUTLASS)
    found = dict(zip(CUTLASS, launched[-1].values, strict=True))
    assert launched[-1].num_ctas == schedule.num_ctas
    wanted = {
        "m": m, "n": n, "out_stride": n, "residual_stride": n + 8, "a_step": 32, "a_block_step": 1,
        "w_step": 32, "tiles_x": 1, "tiles_y": -(-n // config.block_n), "k_iters": 32, "group": 1,
        "early": config.num_stages, "bias": 0,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize("problem", ["unaligned", "absent"])
def test_cutlass_is_refused_by_name_where_it_cannot_run(problem, launched):
    pitch = 4096 if problem == "absent" else 4097
    a, w, one = rows(50, 4096, pitch), rows(6144, 4096, 4096), torch.ones(1)
    call = ScaledGemm(a, w, one, one, backend="cutlass")
    with pytest.raises(ArgumentError, match=r"backend='cutlass' cannot run"):
        run(SCALED_GEMM, call, gemms())
    assert not launched


def test_asked_for_by_name_it_is_never_another_kernel(monkeypatch):
    """Not by pointers as on sm_89, nor by the one that gates many rows."""
    set_cutlass(monkeypatch, True)
    info = replace(H200.info, name="NVIDIA L40S", capability=(8, 9))
    older = ScaledDispatcher(-1, replace(H200, info=info), lambda: ScaledGemmKernels(89, 0))
    problem = ScaledProblem(64, 6144, 4096, kernel="cutlass")
    with pytest.raises(ArgumentError, match=r"on sm_90, and this is sm_89; leave backend at None"):
        older.select(problem, BUDGET)
    for m in (1, 64, 1000):
        for scales in ("block", "row"):
            asked = replace(problem, m=m, n=24576, scales=scales)
            assert gemms().select(asked, BUDGET).kernel == "cutlass"
            assert not fp8.serves_gated(asked, H200.info.capability)


def test_what_is_told_is_the_time_of_what_serves(monkeypatch):
    """Of 64 rows, tuned, by CUTLASS where it is there; of what cuBLASLt serves by our own."""
    problem = ScaledProblem(64, 6144, 4096)
    own = fp8.choose(replace(problem, kernel="own"), BUDGET, H200)
    monkeypatch.setattr(cute, "absent", lambda: "there is none")
    assert gemms().predicted_us(problem, BUDGET) == fp8.predict_us(problem, own, BUDGET, H200)
    set_cutlass(monkeypatch, True)
    chosen = gemms().select(problem, BUDGET)
    assert chosen.kernel == "cutlass"
    assert gemms().predicted_us(problem, BUDGET) == fp8.predict_us(problem, chosen, BUDGET, H200)
    many, whole = ScaledProblem(4096, 6144, 4096, scales="matrix"), Budget(132, "mask", True)
    asked = replace(many, kernel="own")
    assert gemms().select(many, whole).kernel == "cublaslt"
    assert gemms().predicted_us(many, whole) == gemms().predicted_us(asked, whole)


def test_a_kernel_of_cutlass_that_fails_gives_way(launched, monkeypatch):
    """It is tuned here, and compiles no more: own kernels serve from then on, of any rows."""
    set_cutlass(monkeypatch, True)
    a, w, one = rows(64, 4096, 4096), rows(6144, 4096, 4096), torch.ones(64)
    call, dispatcher = ScaledGemm(a, w, one, torch.ones(6144)), gemms()
    problem = ScaledProblem(64, 6144, 4096)
    key = ScaledKey.of(problem, BUDGET)
    own = fp8.choose(problem, BUDGET, H200)
    few = GemmConfig("cutlass", 64, 96, 64, 4, 5, ctas_per_sm=2, group_m=1)
    dispatcher.table = ScaledTable({key: Cell(few, 9.0, own, 10.0)})
    assert dispatcher.select(problem, BUDGET) == few

    def fails(variant):
        raise DeviceError("it does not compile")

    real = gemm_compile.ScaledVariant.compile

    def compiled(variant):
        return fails(variant) if variant.kernel == "cutlass" else real(variant)

    monkeypatch.setattr(gemm_compile.ScaledVariant, "compile", compiled)
    with pytest.warns(RuntimeWarning, match="other kernels serve from now on"):
        run(SCALED_GEMM, call, dispatcher)
    assert len(launched) == 1
    assert dispatcher.select(problem, BUDGET) == own


def test_a_product_of_rows_and_of_a_matrix(launched):
    a, w = rows(9, 256, 256), rows(64, 256, 256)
    call = ScaledGemm(a, w, torch.ones(9), torch.ones(64, 1), static_weights=True)
    run(SCALED_GEMM, call, gemms())
    found = named(launched[-1], WS)
    assert (found["a_step"], found["a_block_step"], found["w_step"]) == (1, 0, 1)
    assert found["early"] == fp8.choose(ScaledProblem(16, 64, 256), BUDGET, H200).num_stages
    run(SCALED_GEMM, call._replace(a_scale=torch.ones(()), w_scale=torch.ones(1)), gemms())
    found = named(launched[-1], WS)
    assert (found["a_step"], found["a_block_step"], found["w_step"]) == (0, 0, 0)


def test_what_is_not_aligned_goes_by_pointers(launched):
    a, w = rows(9, 250, 251), rows(60, 250, 250)
    run(SCALED_GEMM, ScaledGemm(a, w, torch.ones(9), torch.ones(1)), gemms())
    names = ["a", "w", "out", "bias", "residual", "a_scale", "w_scale"]
    found = named(launched[-1], [*names, *gemm_compile.POINTER_NUMBERS])
    wanted = {"m": 9, "n": 60, "k": 250, "a_stride": 251, "w_stride": 250, "out_stride": 60,
              "a_step": 1, "a_block_step": 0, "w_step": 0, "tiles_m": 1, "tiles_n": 1}  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


def test_a_capture_loads_nothing(launched):
    a, w, one = rows(9, 256, 256), rows(64, 256, 256), torch.ones(1)
    dispatcher = gemms()
    with pytest.raises(WarmupError, match="needs a kernel that is not loaded"):
        run(SCALED_GEMM, ScaledGemm(a, w, one, one), dispatcher, capturing=True)
    assert not launched
    run(SCALED_GEMM, ScaledGemm(a, w, one, one), dispatcher)
    run(SCALED_GEMM, ScaledGemm(a, w, one, one), dispatcher, capturing=True)
    assert len(launched) == 2


@pytest.mark.parametrize("extra", ["absent", "there"])
def test_gate_and_up_of_many_rows_are_one_launch(extra, launched, monkeypatch):
    set_cutlass(monkeypatch, extra == "there")
    m, width, k = 300, 1536, 4096
    a, w = rows(m, k, k + 32), rows(2 * width, k, k)
    scales, out_scale = torch.ones(24, 32), torch.ones(12, m).t()
    out = rows(m, width, width + 48)
    call = QuantizedSwiglu(a, w, torch.ones(m, 32), scales, out_scale, out=out, static_weights=True)
    assert run(QUANTIZED_SWIGLU, call, gemms()) is out
    (only,) = launched
    found = named(only, GATED)
    assert only.num_ctas == 24
    wanted = {
        "m": m, "out_stride": (width + 48) // 16, "out_step": 1, "out_block_step": m, "a_step": 32,
        "a_block_step": 1, "w_step": 32, "tiles_x": 3, "tiles_y": 12, "k_iters": 32, "group": 3,
        "early": 4,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("m", "options"),
    [(64, {}), (300, {"backend": "unfused"}), (300, {"batch_invariant": True}), (300, {"row": 1})],
)
def test_gate_and_up_of_others_are_two(m, options, launched):
    by_row = options.pop("row", 0)
    a, w = rows(m, 256, 256), rows(512, 256, 256)
    scales = (torch.ones(m), torch.ones(512), torch.ones(m))
    if not by_row:
        scales = (torch.ones(m, 2), torch.ones(4, 2), torch.ones(m, 2))
    gate_up = torch.zeros(m, 512).bfloat16()
    call = QuantizedSwiglu(a, w, *scales, gate_up=gate_up, **options)
    with patch("smkern.ops.fp8.swiglu.quant_dispatcher", lambda index: quants()):
        out = run(QUANTIZED_SWIGLU, call, gemms())
    assert (out.shape, out.dtype) == ((m, 256), E4M3)
    product, silu = launched
    assert named(product, WS)["m"] == m
    found = named(silu, [*PARAMETERS["silu_and_mul"]])
    assert (found["rows"], found["x_step"], found["out_step"]) == (m, 512 // 8, 256 // 8)
    assert (found["scale_step"], found["block_step"]) == ((1, 0) if by_row else (2, 1))


def test_one_launch_that_cannot_be_is_refused(launched):
    a, w, one = rows(9, 256, 256), rows(512, 256, 256), torch.ones(1)
    call = QuantizedSwiglu(a, w, one, one, torch.ones(9), backend="own")
    with pytest.raises(ArgumentError, match="takes scales of blocks"):
        run(QUANTIZED_SWIGLU, call, gemms())
    with pytest.raises(ArgumentError, match="and 'unfused'"):
        run(QUANTIZED_SWIGLU, call._replace(backend="tma"), gemms())


def quants() -> OperatorDispatcher[Any, Any]:
    return OperatorDispatcher(H200, lambda: QuantKernels(90), fp8_rows.choose)


def test_rows(launched):
    x = torch.zeros(70, 520).bfloat16()[:, :512]
    run(QUANTIZE, Quantize(x, "block"), quants())
    found = named(launched[-1], [*PARAMETERS["quantize"]])
    assert (found["x_step"], found["out_step"], found["rows"]) == (65, 64, 70)
    assert (found["scale_step"], found["block_step"]) == (4, 1)
    run(QUANTIZE, Quantize(x, "weight_block"), quants())
    found = named(launched[-1], [*PARAMETERS["quantize_tiles"]])
    assert (found["scale_step"], found["block_step"], found["rows"]) == (4, 1, 70)
    run(QUANTIZE_BY, QuantizeBy(x, torch.ones(())), quants())
    found = named(launched[-1], [*PARAMETERS["quantize_by"]])
    assert (found["x_step"], found["out_step"], found["rows"]) == (65, 64, 70)
    launched.clear()
    q, scale = run(QUANTIZE, Quantize(x, "tensor"), quants())
    assert (q.shape, scale.shape) == ((70, 512), (1,))
    largest, by = launched
    assert named(largest, [*PARAMETERS["largest"]])["rows"] == 70
    assert named(by, [*PARAMETERS["quantize_by"]])["out_step"] == 64
    scale = torch.empty(4, 70).t()
    weight, residual = torch.ones(512).bfloat16(), torch.zeros(70, 512).bfloat16()
    run(SCALED_ADD_RMS_NORM, ScaledAddRmsNorm(x, residual, weight, scale, 0.0), quants())
    found = named(launched[-1], [*PARAMETERS["add_rms_norm"]])
    wanted = {"x_step": 65, "residual_step": 64, "out_step": 64, "scale_step": 1, "block_step": 70,
              "rows": 70}  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    run(SCALED_SILU_AND_MUL, ScaledSiluAndMul(x, torch.empty(70)), quants())
    found = named(launched[-1], [*PARAMETERS["silu_and_mul"]])
    assert (found["x_step"], found["out_step"], found["scale_step"]) == (65, 32, 1)


def test_check_of_experts_reads_no_memory_in_a_capture(launched):
    w = torch.zeros(3, 256, 512, dtype=torch.uint8).view(E4M3)
    call = ScaledGrouped(
        rows(70, 512, 512), w, torch.ones(1), torch.ones(1), ints(0, 9, 8, 70), check=True
    )
    choose = fp8_grouped.selector(H200)
    kernels = OperatorDispatcher(H200, lambda: ScaledGroupedKernels(90), choose)
    with pytest.raises(ArgumentError, match=r"expert_offsets\[2\] is 8, wanted 9"):
        run(SCALED_GROUPED, call, kernels)
    with pytest.raises(ArgumentError, match="check=True reads device memory"):
        run(SCALED_GROUPED, call, kernels, capturing=True)
    assert not launched


@pytest.mark.parametrize(
    ("shape", "steps"),
    [((1,), (0, 0)), ((3,), (0, 1)), ((3, 256), (1, 256)), ((3, 256, 1), (1, 256)),
     ((3, 2, 4), (4, 8))],
)  # fmt: skip
@pytest.mark.parametrize("gap", [0, 1])
def test_experts(shape, steps, gap, launched):
    w = torch.zeros(3, 256 + gap, 512, dtype=torch.uint8).view(E4M3)[:, :256]
    blocks = shape == (3, 2, 4)
    a_scale = torch.ones(70, 4) if blocks else torch.ones(70)
    call = ScaledGrouped(
        rows(70, 512, 528), w, a_scale, torch.ones(shape), torch.zeros(4).int(), True
    )
    choose = fp8_grouped.selector(H200)
    kernels = OperatorDispatcher(H200, lambda: ScaledGroupedKernels(90), choose)
    assert run(SCALED_GROUPED, call, kernels).shape == (70, 128)
    found = named(launched[-1], GROUPED_POINTER if gap else GROUPED_WS)
    assert (found["w_step"], found["w_expert_step"]) == steps
    assert (found["a_step"], found["a_block_step"]) == ((4, 1) if blocks else (1, 0))
    wanted = {"rows": 70, "num_experts": 3, "tiles_n": 2}
    if gap:
        wanted |= {"a_stride": 33, "w_stride": 32, "expert_stride": 257 * 32, "out_stride": 128,
                   "n": 128, "half": 128, "k": 32}  # fmt: skip
    else:
        wanted |= {"n": 16, "expert_rows": 256, "half_rows": 128, "out_stride": 16, "k_iters": 4}
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("n", "k", "swiglu", "blocks", "kernel"),
    [
        (768, 2048, True, True, "ws"),
        (200, 400, False, False, "ws"),
        (200, 512, False, True, "ws"),
        (200, 512, True, True, "pointer"),
        (200, 512, True, False, "ws"),
        (204, 512, False, False, "pointer"),
        (200, 408, False, False, "pointer"),
    ],
)
def test_experts_of_widths_that_maps_cannot_read_go_by_pointers(n, k, swiglu, blocks, kernel):
    high = n * (1 + swiglu)
    w = torch.zeros(2, high, k, dtype=torch.uint8).view(E4M3)
    scales = (torch.ones(9, k // 128), torch.ones(2, -(-high // 128), k // 128))
    scales = scales if blocks else (torch.ones(9), torch.ones(2, high))
    call = ScaledGrouped(rows(9, k, k), w, *scales, torch.zeros(3).int(), swiglu)
    problem = SCALED_GROUPED.problem(call, True)
    assert problem is not None
    assert fp8_grouped.kernel_of(problem, 90) == kernel
    assert fp8_grouped.kernel_of(problem, 89) == "pointer"
    unaligned = SCALED_GROUPED.problem(call, False)
    assert unaligned is not None
    assert fp8_grouped.kernel_of(unaligned, 90) == "pointer"


def test_tiles_of_experts_are_higher_with_more_rows_whatever_the_budget():
    heights = [
        {
            fp8_grouped.choose(ScaledGroupedProblem(rows, 8, 768, 2048, True), budget, 90).block_m
            for budget in (BUDGET, Budget(132, "grid"))
        }
        for rows in (1, 128, 129, 256, 257, 100_000)
    ]
    assert heights == [{16}, {16}, {32}, {32}, {128}, {128}]
