"""Updates the rows of requests that arrive, move, leave or get pages, in Triton.

A record changes one row (`smkern.kernels.slots_launch`) and is applied by one warp, which finishes
reading a source row before it marks it finished. No record reads a row that another one writes, so
records may run in any order, on any number of CTAs.
"""

from __future__ import annotations

import triton
import triton.language as tl

RECORD = tl.constexpr(8)
FIELDS = tl.constexpr(7)
SET_VALUES = tl.constexpr(1)
SET_FINISHED = tl.constexpr(2)
FINISHED = tl.constexpr(4)


@triton.jit
def _words_of(row, value, rows, STOP: tl.constexpr):
    """Offsets of a row's values in `words`: columns, the seed's pair, then stop tokens."""
    field = value * rows + row
    seed = FIELDS * rows + 2 * row + value - FIELDS
    stop = (FIELDS + 2) * rows + STOP * row + value - FIELDS - 2
    return tl.where(value < FIELDS, field, tl.where(value < FIELDS + 2, seed, stop))


@triton.jit
def _copy_entries(from_ptr, to_ptr, count, BLOCK: tl.constexpr):
    """Copy page table entries, BLOCK at a time."""
    for begin in range(0, count, BLOCK):
        entry = begin + tl.arange(0, BLOCK)
        pages = tl.load(from_ptr + entry, mask=entry < count)
        tl.store(to_ptr + entry, pages, mask=entry < count)


@triton.jit
def update_slots(
    words_ptr, finished_ptr, table_ptr, records_ptr, records, rows, max_pages,
    STOP: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply `records` records; the values and pages that they refer to follow them.

    words: [rows * values] int32; finished: [rows] uint8; table: [rows, max_pages] int32.
    LANES: a power of two, at least the values of a row.
    """
    VALUES: tl.constexpr = FIELDS + 2 + STOP
    value = tl.arange(0, LANES)
    mask = value < VALUES
    numbers_ptr = records_ptr + records * RECORD
    for index in range(tl.program_id(0), records, tl.num_programs(0)):
        record = records_ptr + index * RECORD
        target = tl.load(record)
        source = tl.load(record + 1)
        flags = tl.load(record + 2)
        taken = tl.load(record + 3)
        first = tl.load(record + 4)
        count = tl.load(record + 5)
        pages_ptr = numbers_ptr + tl.load(record + 6)
        words = words_ptr + _words_of(target, value, rows, STOP)
        target_at = table_ptr + target.to(tl.int64) * max_pages
        if source >= 0:
            kept = tl.load(words_ptr + _words_of(source, value, rows, STOP), mask=mask)
            done = tl.load(finished_ptr + source)
            tl.store(words, kept, mask=mask)
            tl.store(finished_ptr + target, done)
            _copy_entries(table_ptr + source.to(tl.int64) * max_pages, target_at, taken, BLOCK)
            tl.debug_barrier()
            tl.store(finished_ptr + source, tl.full((), 1, tl.uint8))
        if flags & SET_VALUES:
            values_ptr = numbers_ptr + tl.load(record + 7)
            tl.store(words, tl.load(values_ptr + value, mask=mask), mask=mask)
        if flags & SET_FINISHED:
            tl.store(finished_ptr + target, ((flags & FINISHED) // FINISHED).to(tl.uint8))
        _copy_entries(pages_ptr, target_at + first, count, BLOCK)
