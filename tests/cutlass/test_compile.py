"""What CUTLASS's DSL makes of every kind of kernel: widths, copies, and nothing spilled.

A step of its own (`make test-cute`): the package is large, and needs no GPU.
"""

from __future__ import annotations

import re
from itertools import product

import pytest

from smkern.kernels.compile import Artifact
from smkern.kernels.cute.compile import compile_many, compile_variant
from smkern.kernels.fp8.gemm_compile import ScaledVariant
from smkern.kernels.fp8.gemm_compile import variant_of as scaled_variant_of
from smkern.kernels.gemm_variants import Variant, variant_of
from smkern.tuning import fp8_cutlass
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem
from smkern.tuning.constraints import MAX_STAGES, SHARED_BYTES
from smkern.tuning.fp8 import ScaledProblem
from tests.kernels.cubins import told, usage

LIMIT = SHARED_BYTES[9, 0]
PLAIN, RESIDUAL, GLU = Epilogue(), Epilogue(residual=True), Epilogue(swiglu=True)
FULL = [Epilogue(True, True, activation) for activation in ("silu", "gelu")]


def variant(rows: int, columns: int, swap: bool, epilogue: Epilogue, dtype="bf16") -> Variant:
    """With as many stages as fit."""
    block_m, block_n = (columns, rows) if swap else (rows, columns)
    stages = min(MAX_STAGES, (LIMIT - 1024) // (128 * (rows + columns)))
    config = GemmConfig("cutlass", block_m, block_n, 64, 4, stages, swap)
    return variant_of(GemmProblem(96, 256, 512, dtype, epilogue), config, 90)


SMALL = [
    variant(rows, columns, swap, epilogue, dtype)
    for (rows, columns), swap, (epilogue, dtype) in product(
        [(64, 24), (128, 80)], (False, True),
        [(PLAIN, "bf16"), (GLU, "bf16"), (FULL[0], "bf16"), (FULL[1], "fp16")],
    )
    if not (epilogue.swiglu and not swap and columns % 16)
]  # fmt: skip
LARGEST = [
    variant(64, 256, False, PLAIN), variant(64, 256, True, GLU), variant(128, 200, False, PLAIN),
    variant(128, 200, False, RESIDUAL), variant(128, 192, False, GLU),
    variant(128, 184, True, RESIDUAL), variant(128, 184, True, GLU),
    *(variant(128, 176, swap, full) for swap in (False, True) for full in FULL),
    *(variant(64, 256, swap, full, "fp16") for swap in (False, True) for full in FULL),
]  # fmt: skip
"""The most accumulators that constraints allow."""


def scaled(config: GemmConfig, scales, epilogue: Epilogue = PLAIN) -> ScaledVariant:
    return scaled_variant_of(ScaledProblem(64, 256, 512, "bf16", epilogue, scales), config, 90)


WIDEST = {(x.num_warps, x.ctas_per_sm): x for x in fp8_cutlass.variants((9, 0))}
"""By multiplying warps and CTAs an SM, of which each has fewer registers."""
SCALED = [
    *(scaled(config, scales) for config in WIDEST.values() for scales in ("block", "row")),
    *(scaled(WIDEST[4, 2], scales, FULL[1]) for scales in ("block", "row")),  # erf takes the most
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    compile_many([*SMALL, *LARGEST, *SCALED], workers=2)


def sass(kernel: Artifact, folder) -> str:
    return told(kernel, folder, "-sass")


@pytest.mark.parametrize("wanted", [*SMALL, *LARGEST], ids=str)
def test_one_accumulator_of_the_tiles_width_rows_by_16_bytes_and_nothing_spilled(wanted, tmp_path):
    """A thread's share of a block is 4 bytes of a row: four blocks give it 16, but for gelu."""
    kernel = compile_variant(wanted)
    kind = "BF16" if wanted.dtype == "bf16" else ""
    found = set(re.findall(r"HGMMA\.(\S+)", code := sass(kernel, tmp_path)))
    assert {each.removesuffix(f".{kind}") for each in found} == {f"64x{wanted.block_y}x16.F32"}
    blocks = wanted.block_y // 8 // (1 + (wanted.swiglu and not wanted.swap))
    strips = wanted.block_x // 64 * (1 if wanted.swap else 2)
    fours = blocks * (2 - wanted.swiglu if wanted.swap else 1) // 4
    count = strips * fours * (wanted.activation != "gelu")
    assert len(re.findall(r"\bSTG\.E\.128\b", code)) == count
    assert len(re.findall(r"\bLDG\.E\.128\b", code)) == wanted.residual * count
    assert not re.search(r"\b(LDL|STL)\b", code)
    registers, spilled = usage(kernel, tmp_path)
    assert (registers, spilled) == (168, 0)
    assert kernel.shared_bytes <= LIMIT


@pytest.mark.parametrize("wanted", SMALL, ids=str)
def test_one_copy_for_a_box_whatever_the_width(wanted, tmp_path):
    """Weights early, weights, activations; SwiGLU's have pairs of 8 rows as dimensions."""
    copies = re.findall(r"UTMALDG\.(\dD)", sass(compile_variant(wanted), tmp_path))
    assert sorted(copies) == (["2D", "4D", "4D"] if wanted.swiglu else ["2D"] * 3)


@pytest.mark.parametrize("wanted", SCALED, ids=str)
def test_e4m3_is_added_while_the_next_is_multiplied(wanted, tmp_path):
    """Where the compiler cannot see that sums of products in flight are left alone, it waits after
    each product: as many waits as products."""
    kernel = compile_variant(wanted)
    code = sass(kernel, tmp_path)
    products = re.findall(r"QGMMA\.(\S+)", code)
    turns = 8 if wanted.ctas_per_sm == 1 else 4
    width = wanted.columns // wanted.parts
    assert set(products) == {f"64x{width}x32.F32.E4M3.E4M3"}
    assert len(products) == 4 * (turns + 1)  # of a step 4, of turns and of a step that is left
    waits = len(re.findall(r"WARPGROUP\.DEPBAR", code))
    assert waits == turns + 1
    assert not re.search(r"\b(LDL|STL)\b", code)
    added = len(re.findall(r"\bFFMA\b" if wanted.blocks else r"\bFADD\b", code))
    assert added >= (turns + 1) * width // 2
    registers, spilled = usage(kernel, tmp_path)
    assert spilled == 0
    assert registers * kernel.num_threads * wanted.ctas_per_sm <= 65_536
    assert wanted.ctas_per_sm * (kernel.shared_bytes + 1024) <= LIMIT + 1024
