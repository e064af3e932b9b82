"""How a GEMM's tiles are distributed over CTAs. Kernels and tests run the same arithmetic.

A launch of `ctas` CTAs works through `stream_tiles` tiles whose K loops are cut into equal
contiguous ranges, one per CTA (stream-K), and then through `whole_tiles` tiles, round-robin. The
first `whole_tiles` tiles in raster order are whole, the last `stream_tiles` are streamed.

`device_functions` compiles these for Triton or Gluon: both decorate the same Python source.
"""

import triton.language as tl  # noqa: F401 (Triton's interpreter looks it up)


def _num_segments(pid, ctas, whole_tiles, stream_iters, quantum, k_iters):
    """How many (tile, k range) segments CTA `pid` works through, and how many are streamed."""
    begin = min(pid * quantum, stream_iters)
    end = min(begin + quantum, stream_iters)
    streamed = (end + k_iters - 1) // k_iters - begin // k_iters
    if end <= begin:
        streamed = 0
    whole = (whole_tiles - pid + ctas - 1) // ctas
    if whole_tiles <= pid:
        whole = 0
    return streamed, streamed + whole


def _segment(i, streamed, pid, ctas, whole_tiles, stream_iters, quantum, k_iters):
    """Segment `i` of CTA `pid`: tile and range of K steps."""
    begin = min(pid * quantum, stream_iters)
    end = min(begin + quantum, stream_iters)
    nth = begin // k_iters + i
    tile = whole_tiles + nth
    k_begin = max(begin - nth * k_iters, 0)
    k_end = min(end - nth * k_iters, k_iters)
    if i >= streamed:
        tile = pid + (i - streamed) * ctas
        k_begin = 0
        k_end = k_iters
    return tile, k_begin, k_end


def _contributors(nth, quantum, k_iters):
    """The first CTA that works on streamed tile `nth`, and how many CTAs do."""
    first = (nth * k_iters) // quantum
    last = (nth * k_iters + k_iters - 1) // quantum
    return first, last - first + 1


def _partial_slot(cta, nth, quantum, k_iters):
    """Workspace slot of CTA `cta`'s partial of streamed tile `nth`: 2 slots per CTA.

    A CTA writes at most two partial tiles, at the beginning and at the end of its range.
    """
    slot = 2 * cta
    if cta * quantum < nth * k_iters:
        slot = 2 * cta + 1
    return slot


def _first_row(tile_m, block_m, m):
    """First row that row tile `tile_m` reads: the last tile ends with the last row.

    It reads some rows of the previous tile again instead of rows past the end, which cost more: 1.7
    times the time was seen for 204 rows in two tiles of 128. It stores only its own rows.
    """
    first = tile_m * block_m
    if (first + block_m > m) & (m >= block_m):
        first = m - block_m
    return first


def _tile_coords(tile, tiles_m, tiles_n, group_m):
    """Raster in groups of `group_m` row tiles, so that active CTAs share operands in L2."""
    per_group = group_m * tiles_n
    group = tile // per_group
    first_m = group * group_m
    rows = min(tiles_m - first_m, group_m)
    within = tile - group * per_group
    return first_m + within % rows, within // rows
