"""CUTLASS's tiles of e4m3: 64 rows by any multiple of 16 columns, which the extra brings.

What an SM receives bounds a product on few SMs, and `a` comes with each tile: a tile of 256 columns
takes in 1.25 times what it has of w, one of 96 columns 1.67 times.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from smkern.tuning import constraints
from smkern.tuning.config import GemmConfig
from smkern.tuning.cost_variant import CUTLASS_TIME

ROWS = 64
FEWEST_ROWS = 16
"""Of 84 cells of 16 rows of an H200 none gained by these tiles. Of more the best of all takes, by
blocks and by rows, 0.93 and 0.99 of our own kernels' best for 32 rows, 0.93 and 0.90 for 64, 0.95
and 0.91 for 77 and 128, 0.97 and 0.92 for 256, 0.99 and 0.95 for 512 and 1024, 0.99 and 0.97 for
more (664 cells)."""
COLUMNS = *range(48, 129, 16), 160, 176, 192, 224, 256
"""Of 144, 208 and 240 an H200 took three in 228 cells."""
BLOCK = 128
"""Rows of w that share a block's scale; columns of a warpgroup at most, which so meet two."""
CHOOSING = 0.1
"""What it adds to a product's time to choose w's block for every 8 columns."""
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


def alike(columns: int) -> int:
    """Blocks of 8 columns of a warpgroup that always are in one block of w."""
    return gcd(columns, BLOCK) // 8


def over_twin(blocks: bool, config: GemmConfig) -> float:
    """Time of a product over that of 16-bit elements of as many bytes.

    Of 720 cells of an H200, 77 to 4,096 rows, the choice among all takes 1.007 of the best's time
    by rows, and by blocks 1.017, without `CHOOSING` 1.022.
    """
    columns = config.block_n * 4 // config.num_warps
    longer = 1 + CHOOSING / alike(columns) if blocks else 1.0
    return longer / CUTLASS_TIME


def pays(m: int) -> bool:
    """Whether so many rows may be faster by these tiles."""
    return m > FEWEST_ROWS


def is_sure(m: int, blocks: bool) -> bool:
    """Whether the model that says so replaces what was tuned without them.

    By 1.05 it does in 117 of 164 cells of 64 rows of an H200, of which 11 become slower, by 16% at
    worst; all take 0.92 of the time in geomean. Of more by rows in 440 of 489, 28 slower, by 9% at
    worst: 0.94; by blocks 428 of 522, of which 92 become slower, by 19% at worst: not there.
    """
    return m > ROWS // 2 and (m <= ROWS or not blocks)


@lru_cache(maxsize=8)
def variants(capability: constraints.Capability) -> tuple[GemmConfig, ...]:
    """The kernels, each with as many stages as fit."""
    found = []
    for columns in COLUMNS * (capability[0] == 9):
        parts = -(-columns // BLOCK)
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
