"""CUTLASS's tiles of e4m3: 64 rows by any multiple of 16 columns, which the extra brings.

What an SM receives bounds a product on few SMs, and `a` comes with each tile: a tile of 256 columns
takes in 1.25 times what it has of w, one of 96 columns 1.67 times.
"""

from __future__ import annotations

from functools import lru_cache

from smkern.tuning import constraints
from smkern.tuning.config import GemmConfig

ROWS = 64
FEWEST_ROWS = 16
"""Of 84 cells of 16 rows of an H200 none gained by these tiles. Of more the best of all takes, by
blocks and by rows, 0.93 and 0.99 of our own kernels' best for 32 rows, 0.93 and 0.90 for 64, 0.95
and 0.91 for 77 and 128, 0.97 and 0.92 for 256, 0.99 and 0.95 for 512 and 1024, 0.99 and 0.97 for
more (664 cells)."""
COLUMNS = *range(48, 129, 16), 160, 176, 192, 224, 256
"""Of 144, 208 and 240 an H200 took three in 228 cells."""
WIDEST = 128
"""Columns of a warpgroup at most, which meet two blocks of w."""
ODD = 1.1
"""Time over the twin's by blocks where blocks of w end inside 16 columns of a warpgroup."""
SCALE_BYTES = 4096
"""Shared memory that slots take before the stages, beside the barriers' kilobyte."""
OTHER_REGISTERS = 24
"""Registers of a multiplying thread beside its three sums."""


def registers(parts: int, ctas_per_sm: int) -> tuple[int, int]:
    """Registers of a thread that multiplies, in one of so many groups, and of one that copies."""
    all_groups = constraints.REGISTERS_PER_SM // (128 * ctas_per_sm)
    return min(240, (all_groups - 40) // parts // 8 * 8), 40


def slots(blocks: bool) -> tuple[int, int]:
    """Numbers of a slot of scales, of 68 rows in four steps or of 64 rows and 256, and slots."""
    return (272, 4) if blocks else (320, 3)


def over_twin(blocks: bool, config: GemmConfig) -> float:
    """Time of a product over that of 16-bit elements of as many bytes.

    Of 228 cells of an H200 the choice takes 1.013 of the best's time, 1.17 at worst; without `ODD`
    1.018 and 1.26.
    """
    columns = config.block_n * 4 // config.num_warps
    return ODD if blocks and columns % 16 else 1.0


def pays(m: int) -> bool:
    """Whether so many rows may be faster by these tiles."""
    return m > FEWEST_ROWS


def is_sure(m: int) -> bool:
    """Whether the model that says so replaces what was tuned without them.

    By 1.05 it does in 101 of 150 cells of 40 and 64 rows of an H200, of which 7 become slower, by
    8% at worst; all take 0.94 of the time in geomean. Of 77 and 128 rows a third would.
    """
    return ROWS // 2 < m <= ROWS


@lru_cache(maxsize=8)
def variants(capability: constraints.Capability) -> tuple[GemmConfig, ...]:
    """The kernels, each with as many stages as fit."""
    found = []
    for columns in COLUMNS * (capability[0] == 9):
        parts = -(-columns // WIDEST)
        for ctas in (1, 2)[: 3 - parts]:
            if 3 * columns // parts // 2 + OTHER_REGISTERS > registers(parts, ctas)[0]:
                continue
            for stages in range(constraints.MAX_STAGES, 2, -1):
                config = GemmConfig(
                    "cutlass", ROWS, columns, 64, 4 * parts, stages, ctas_per_sm=ctas
                )
                each = constraints.shared_bytes(config) + SCALE_BYTES
                if constraints.ctas_fit(each, ctas, capability):
                    found.append(config)
                    break
    return tuple(found)
