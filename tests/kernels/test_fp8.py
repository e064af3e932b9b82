"""Kernels of e4m3 compiled for devices that are absent: they fit, multiply wide, spill nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smkern.kernels.fp8 import (
    gated_launch,
    gemm_gated,
    gemm_triton,
    gemm_ws,
    grouped_launch,
    grouped_triton,
    grouped_ws,
    rows_launch,
    rows_triton,
)
from smkern.kernels.fp8.gemm_compile import NUMBERS, POINTER_NUMBERS, variant_of
from smkern.kernels.fp8.gemm_launch import ScaledGemmKernels
from smkern.kernels.fp8.grouped_launch import ScaledGroupedKernels
from smkern.kernels.fp8.rows_launch import QuantKernels
from smkern.tuning import fp8
from smkern.tuning.config import Epilogue, GemmConfig
from smkern.tuning.constraints import shared_limit
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.fp8_grouped import ScaledGroupedProblem
from smkern.tuning.fp8_rows import QuantProblem
from tests.kernels.cubins import told, usage
from tests.kernels.test_moe_triton import waits_first

pytestmark = pytest.mark.slow

FULL = Epilogue(True, True, "silu")
GIVEN = ["out_ptr", "bias_ptr", "residual_ptr", "partials", "counters", "a_scale", "w_scale"]
"""Addresses of a GEMM, in order."""
WIDE = {
    "128x128": GemmConfig("ws", 128, 128, 64, 8, 6, eager=True),
    "128x192": GemmConfig("ws", 128, 192, 64, 8, 5, eager=True),
    "128x256": GemmConfig("ws", 128, 256, 64, 8, 4, eager=True),
    "64x128-alone": GemmConfig("ws", 64, 128, 64, 4, 9, eager=True),
    "64x128": GemmConfig("ws", 64, 128, 64, 4, 4, ctas_per_sm=2, eager=True),
    "64x128-swapped": GemmConfig("ws", 64, 128, 64, 8, 8, True, eager=True),
    "16x64-swapped": GemmConfig("ws", 16, 64, 64, 4, 7, True, ctas_per_sm=3, eager=True),
}


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("config", WIDE.values(), ids=WIDE)
def test_a_gemm_fits_and_keeps_its_sums_in_registers(config, blocks, tmp_path) -> None:
    assert fp8.fits_registers(config)
    if config.swap and blocks:
        config = replace(config, block_m=min(config.block_m, fp8.MAX_SWAPPED_COLUMNS))
    wide = fp8.is_wide(config)
    scales = "block" if blocks or wide else "row"
    problem = ScaledProblem(64, 4096, 4096, epilogue=FULL, scales=scales)
    variant = variant_of(problem, replace(config, split=0), 90)
    artifact = variant.compile()
    registers, stack = usage(artifact, tmp_path)
    assert stack <= 16 * wide, "what spills of a wide tile spills in the epilogue"
    assert config.ctas_per_sm * registers * artifact.num_threads <= 65_536
    assert config.ctas_per_sm * (artifact.shared_bytes + 1024) <= shared_limit((9, 0)) + 1024
    code = told(artifact, tmp_path, "-sass")
    assert set(re.findall(r"QGMMA\.(\w+)\.F32\.E4M3\.E4M3", code)) == {
        f"64x{variant.columns // variant.sums}x32"
    }
    assert "UTMALDG.2D" in code
    waits = re.findall(r"ACQBULK|DEPBAR\.GDC", code)
    assert len(waits) > fp8.parts(config), "each warpgroup, and the copying warp"
    if wide:
        at = [x.start() for x in re.finditer("QGMMA", code)]
        step = 4 * variant.sums
        loops = [code[a:b] for a, b in zip(at[::step], at[step - 1 :: step], strict=True)]
        assert not any(re.search(r"\b(LDL|STL)\b", loop) for loop in loops)
    else:
        assert not re.search(r"\b(LDL|STL)\b", code)
    products = len(re.findall("QGMMA", code))
    assert code.count("WARPGROUP.DEPBAR") * 4 == products, "no product waits for another"


def test_gate_and_up_stay_in_registers(tmp_path: Path) -> None:
    artifact = gated_launch.GatedVariant("bf16", 90).compile()
    registers, stack = usage(artifact, tmp_path)
    assert stack == 0
    assert registers * artifact.num_threads <= 65_536
    assert artifact.shared_bytes <= shared_limit((9, 0))
    code = told(artifact, tmp_path, "-sass")
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert set(re.findall(r"QGMMA\.(\w+)\.F32\.E4M3\.E4M3", code)) == {"64x64x32"}
    assert "UTMALDG.4D" in code
    assert code.count("WARPGROUP.DEPBAR") * 4 == len(re.findall("QGMMA", code))
    assert "STG.E.128" in code, "16 results of a row at once"


def test_every_variant_fits_by_the_rule() -> None:
    capability = (9, 0)
    for confined in (False, True):
        for config in fp8.variants(True, confined, capability, False):
            assert fp8.shared_bytes(config, True) <= shared_limit(capability)
            assert fp8.fits_registers(config)
            assert confined or config.ctas_per_sm == 1


@pytest.mark.parametrize("capability", [89, 90])
def test_the_pointer_kernel_compiles_without_bulk_copies(capability: int, tmp_path: Path) -> None:
    problem = ScaledProblem(70, 104, 1024, epilogue=FULL, kernel="pointer", scales="block")
    for variant in ScaledGemmKernels(capability, 0).variants(problem):
        artifact = variant.compile()
        code = told(artifact, tmp_path, "-sass")
        assert "UTMALDG" not in code
        assert re.search("QGMMA" if capability == 90 else "QMMA|E4M3", code)
        assert usage(artifact, tmp_path)[1] == 0


@pytest.mark.parametrize(
    ("swiglu", "blocks", "experts"),
    [(False, False, 512), (False, True, 128), (True, False, 128), (True, True, 512)],
)
def test_experts_keep_their_sums_in_registers(swiglu, blocks, experts, tmp_path) -> None:
    problem = ScaledGroupedProblem(64, experts, 768, 2048, swiglu, blocks=blocks)
    for variant in ScaledGroupedKernels(90).variants(problem):
        config, artifact = variant.config, variant.compile()
        wide = swiglu and not config.swap
        registers, stack = usage(artifact, tmp_path)
        assert stack <= 8 * (experts > 256), "what spills is read once a tile"
        assert config.ctas_per_sm * registers * artifact.num_threads <= 65_536
        assert config.ctas_per_sm * (artifact.shared_bytes + 1024) <= shared_limit((9, 0)) + 1024
        code = told(artifact, tmp_path, "-sass")
        columns = config.block_m if config.swap else 64 if wide else 128
        shapes = set(re.findall(r"QGMMA\.(\w+)\.F32\.E4M3\.E4M3", code))
        assert shapes == {f"64x{columns}x32"}
        assert "UTMALDG.2D" in code
        waits = re.findall(r"ACQBULK|DEPBAR\.GDC", code)
        assert len(waits) > config.num_warps // 4, "each warpgroup, and the copying warp"
        products = len(re.findall("QGMMA", code))
        assert code.count("WARPGROUP.DEPBAR") * 4 == products, "no product waits for another"


@pytest.mark.parametrize("capability", [89, 90])
@pytest.mark.parametrize("swiglu", [False, True])
def test_experts_by_pointers_are_of_e4m3(swiglu: bool, capability: int, tmp_path: Path) -> None:
    problem = ScaledGroupedProblem(64, 128, 768, 2048, swiglu, blocks=True, mapped=False)
    for variant in ScaledGroupedKernels(capability).variants(problem):
        assert variant.config.kernel == "pointer"
        artifact = variant.compile()
        code = told(artifact, tmp_path, "-sass")
        assert re.search("QGMMA" if capability == 90 else "QMMA|E4M3", code)
        if capability == 90:
            assert "HMMA" not in code, "fewer than 64 rows are multiplied as fp16"
            assert usage(artifact, tmp_path)[1] == 0


@pytest.mark.parametrize(
    "problem",
    [
        QuantProblem("quantize", "block", 8, 4096),
        QuantProblem("quantize", "token", 8, 12288),
        QuantProblem("quantize", "tensor", 8, 4096),
        QuantProblem("quantize", "weight_block", 8, 4096),
        QuantProblem("add_rms_norm", "block", 8, 4096),
        QuantProblem("silu_and_mul", "block", 8, 12288),
    ],
    ids=lambda x: f"{x.op}-{x.group}",
)
def test_rows_are_converted_by_the_hardware(problem: QuantProblem, tmp_path: Path) -> None:
    for variant in QuantKernels(90).variants(problem):
        artifact = variant.compile()
        code = told(artifact, tmp_path, "-sass")
        assert usage(artifact, tmp_path)[1] == 0
        assert waits_first(code)
        if variant.kernel != "largest":
            assert "E4M3" in code


def test_parameters_are_packed_in_the_kernels_order() -> None:
    for name, parameters in rows_launch.PARAMETERS.items():
        kernel: Any = getattr(rows_triton, f"{name}_fp8")
        assert kernel.arg_names[: len(parameters)] == [*parameters]
    for fn, names in (
        (
            grouped_triton.fp8_grouped_pointer,
            ["a_ptr", "w_ptr", *grouped_launch.ADDRESSES, *grouped_launch.POINTER_NUMBERS],
        ),
        (
            grouped_ws.fp8_grouped_ws,
            ["a_desc", "w_desc", *grouped_launch.ADDRESSES, *grouped_launch.WS_NUMBERS],
        ),
        (
            gemm_triton.fp8_gemm_pointer,
            ["a_ptr", "w_ptr", *GIVEN[:3], *GIVEN[5:], *POINTER_NUMBERS],
        ),
        (gemm_ws.fp8_gemm_ws, ["x_desc", "y_desc", *GIVEN, *NUMBERS]),
        (
            gemm_gated.fp8_gemm_gated,
            ["x_desc", "y_desc", *gated_launch.ADDRESSES, *gated_launch.NUMBERS],
        ),
    ):
        kernel = fn
        assert kernel.arg_names[: len(names)] == names
