"""`check=True`: read the device's memory and name the first thing in it that is wrong.

It waits for the device, so it is for debugging and tests, never for serving or a capture.
"""

from __future__ import annotations

import torch

from smkern.errors import ArgumentError
from smkern.ops.append.call import Call
from smkern.ops.attention.check import check_ranges, check_scales, first
from smkern.ops.reference.append import Places, locate


def check_memory(call: Call) -> None:
    """Check what a call's lengths, table, positions and scales hold.

    Args:
        call: A call whose host side is in order.

    Raises:
        ArgumentError: query ranges that decrease or leave the tokens; a request shorter than its
            new tokens; a length that the table cannot hold; a page id that is no page; two tokens
            of one slot; a position outside `cos_sin`; a scale that is not above 0.
    """
    lens = call.kv_lens.cpu().long()
    tokens, batch = call.k.shape[0], lens.shape[0]
    starts = torch.arange(batch + 1) if call.cu_q_lens is None else call.cu_q_lens.cpu().long()
    check_ranges(starts, tokens, "k whole")
    check_scales(call, "k_scale", "v_scale")
    if not batch:  # tokens of no request, if any
        return
    q_lens = starts.diff()
    request = first((lens < q_lens) & ((lens != 0) | (call.cu_q_lens is not None)))
    if request is not None:
        raise ArgumentError(
            f"kv_lens[{request}] is {int(lens[request])} and request {request} has "
            f"{int(q_lens[request])} new tokens, which it counts: pass the length after them"
        )
    places = locate(
        tokens, call.page_table.cpu(), call.kv_lens.cpu(), page_size=call.k_cache.shape[1],
        num_pages=call.k_cache.shape[0],
        page_indptr=None if call.page_indptr is None else call.page_indptr.cpu(),
        cu_q_lens=None if call.cu_q_lens is None else call.cu_q_lens.cpu(),
    )  # fmt: skip
    _check_places(call, places)
    _check_positions(call, places)


def _check_places(call: Call, places: Places) -> None:
    size, pages = call.k_cache.shape[1], call.k_cache.shape[0]
    token = first(places.live & (places.position >= 0) & ~places.stored)
    if token is not None:
        request, position = int(places.request[token]), int(places.position[token])
        raise ArgumentError(
            f"token {token} is at position {position} of request {request}, entry "
            f"{position // size} of its pages: the page_table has none there, or no page of 0 to "
            f"{pages - 1}; correct the page_table"
        )
    slots = (places.page * size + places.slot)[places.stored]
    order = slots.argsort(stable=True)
    twice = first(slots[order].diff() == 0)
    if twice is not None:
        one, two = places.stored.nonzero().flatten()[order[twice : twice + 2]].tolist()
        page, slot = divmod(int(slots[order[twice]]), size)
        raise ArgumentError(
            f"tokens {one} and {two} (of requests {int(places.request[one])} and "
            f"{int(places.request[two])}) both go to slot {slot} of page {page}: requests must not "
            "share a page that is written"
        )


def _check_positions(call: Call, places: Places) -> None:
    if call.cos_sin is None:
        return
    rows = call.cos_sin.shape[0]
    where = places.position if call.positions is None else call.positions.cpu().long()
    used = places.live & (places.position >= 0) if call.positions is None else places.live
    token = first(used & ((where < 0) | (where >= rows)))
    if token is not None:
        raise ArgumentError(
            f"token {token} (of request {int(places.request[token])}) is at position "
            f"{int(where[token])}, cos_sin has rows 0 to {rows - 1}: make a longer table"
        )
