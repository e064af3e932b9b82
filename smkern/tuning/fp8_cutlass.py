"""CUTLASS's tiles of e4m3: 64 rows by any multiple of 16 columns, which the extra brings."""

from __future__ import annotations

from functools import lru_cache

from smkern.tuning import constraints
from smkern.tuning.config import GemmConfig

ROWS = 64
FEWEST_ROWS, MOST_ROWS = 16, 256
"""Of an H200's cells, 84 of 16 rows gained nothing by these tiles, 84 of 32 rows 3%, 132 of 64 8%,
132 of 128 6%, 32 of 256 4%; where our own won they are counted as that."""
COLUMNS = tuple(range(48, 129, 16))
"""Of 128 at most a tile meets two blocks of w."""
THREADS = 256
"""A warpgroup that multiplies, and one whose warps copy."""
SLOT, SLOTS = 272, 4
"""Numbers of a slot of scales (of 66 rows in four steps, or of 64 rows and 128), and slots."""
SCALE_BYTES = 4096
"""Shared memory that slots take before the stages, beside the barriers' kilobyte."""
OTHER_REGISTERS = 24
"""Registers of a multiplying thread beside its three sums."""


def registers(ctas_per_sm: int) -> tuple[int, int]:
    """Registers of a thread that multiplies and of one that copies."""
    both = constraints.REGISTERS_PER_SM // (THREADS * ctas_per_sm) // 8 * 16
    return min(240, both - 40), 40


def pays(m: int) -> bool:
    """Whether so many rows may be faster by these tiles."""
    return FEWEST_ROWS < m <= MOST_ROWS


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
        for ctas in (1, 2):
            if 3 * columns // 2 + OTHER_REGISTERS > registers(ctas)[0]:
                continue
            for stages in range(constraints.MAX_STAGES, 2, -1):
                config = GemmConfig("cutlass", ROWS, columns, 64, 4, stages, ctas_per_sm=ctas)
                each = constraints.shared_bytes(config) + SCALE_BYTES
                if constraints.ctas_fit(each, ctas, capability):
                    found.append(config)
                    break
    return tuple(found)
