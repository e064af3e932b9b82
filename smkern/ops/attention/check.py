"""`check=True`: read the device's memory and name the first thing in it that is wrong.

It waits for the device, so it is for debugging and tests, never for serving or a capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.kernels.attention.items import OVERFLOW
from smkern.ops.attention.call import Call, shape_of
from smkern.ops.attention.plan import Plan
from smkern.ops.checks import as_float
from smkern.tuning.attention.shapes import AttentionShape


def first(bad: Tensor) -> int | None:
    """The first index at which a vector of booleans is true."""
    return int(bad.int().argmax()) if bad.numel() and bool(bad.any()) else None


def check_lengths(kv_lens: Tensor, cu_q_lens: Tensor | None, shape: AttentionShape) -> None:
    """Raise ArgumentError for the first request whose lengths do not fit a shape.

    Raises:
        ArgumentError: a length that is negative or above max_kv_len; lengths above max_total_kv in
            sum; query ranges that decrease, leave the tokens or exceed max_q_len.
    """
    lens = kv_lens.cpu().long()
    request = first((lens < 0) | (lens > shape.max_kv_len))
    if request is not None:
        raise ArgumentError(
            f"kv_lens[{request}] is {int(lens[request])}, wanted 0 to max_kv_len "
            f"{shape.max_kv_len}: correct it, or plan for longer requests"
        )
    if int(lens.sum()) > shape.max_total_kv:
        raise ArgumentError(
            f"kv_lens sum to {int(lens.sum())}, above max_total_kv {shape.max_total_kv}: plan for "
            "more"
        )
    if cu_q_lens is not None:
        starts = cu_q_lens.cpu().long()
        check_ranges(starts, shape.max_tokens, "q whole, or plan with num_tokens")
        q_lens = starts.diff()
        request = first(q_lens > shape.max_q_len)
        if request is not None:
            raise ArgumentError(
                f"request {request} has {int(q_lens[request])} query tokens, above max_q_len "
                f"{shape.max_q_len}: raise max_q_len"
            )


def check_ranges(starts: Tensor, tokens: int, remedy: str) -> None:
    """Raise ArgumentError where query ranges decrease or leave the tokens."""
    request = first(starts.diff() < 0)
    if request is not None:
        raise ArgumentError(
            f"cu_q_lens[{request + 1}] is {int(starts[request + 1])}, below cu_q_lens[{request}] "
            f"{int(starts[request])}: it must not decrease"
        )
    place = first((starts < 0) | (starts > tokens))
    if place is not None:
        raise ArgumentError(
            f"cu_q_lens[{place}] is {int(starts[place])}, outside the {tokens} tokens: pass "
            f"{remedy}"
        )


def check_scales(call: Any, *positive: str) -> None:
    """Raise ArgumentError for a scale on the device that is not finite, or not above 0."""
    for name in ("k_scale", "v_scale"):
        scale = getattr(call, name)
        if isinstance(scale, Tensor):
            as_float(name, scale.item(), positive=name in positive)


def check_plan(plan: Plan) -> None:
    """Raise ArgumentError where a plan dropped items that found no room.

    Raises:
        ArgumentError: with the count of the items.
    """
    dropped = int(plan.buffer[OVERFLOW])
    if dropped:
        raise ArgumentError(
            f"the plan dropped {dropped} items: lengths or query tokens exceed its max_total_kv "
            f"{plan.shape.max_total_kv}, max_kv_len {plan.shape.max_kv_len} or num_tokens "
            f"{plan.shape.max_tokens}; plan with larger bounds"
        )


def check_memory(call: Call) -> None:
    """Check what a call's lengths, table, scales and plan hold, for rows in use.

    Args:
        call: A call whose host side is in order.

    Raises:
        ArgumentError: see `check_lengths`, `check_plan`; a table that is too short for a length; a
            page id that is no page of the cache; a scale that is not finite, or not above 0.
    """
    if call.plan is not None and call.q.device.type == "cuda":
        check_plan(call.plan)
    check_lengths(call.kv_lens, call.cu_q_lens, shape_of(call))
    if call.cu_q_lens is not None and int(call.cu_q_lens[-1]) > call.q.shape[0]:
        raise ArgumentError(
            f"cu_q_lens ends at {int(call.cu_q_lens[-1])}, q has {call.q.shape[0]} tokens: pass q "
            "whole"
        )
    check_scales(call, "k_scale")
    _check_table(call)


def _check_table(call: Call) -> None:
    page_size, num_pages = call.k_cache.shape[1], call.k_cache.shape[0]
    table, lens = call.page_table.cpu().long(), call.kv_lens.cpu().long()
    counts = -(-lens // page_size)
    if call.page_indptr is None:
        starts, room = torch.zeros_like(counts), torch.full_like(counts, table.shape[1])
    else:
        indptr = call.page_indptr.cpu().long()
        place = first((indptr < 0) | (indptr > table.shape[0]))
        if place is not None:
            raise ArgumentError(
                f"page_indptr[{place}] is {int(indptr[place])}, outside the page_table's "
                f"{table.shape[0]} entries: correct it"
            )
        starts, room = indptr[:-1], indptr.diff()
    request = first(counts > room)
    if request is not None:
        raise ArgumentError(
            f"request {request} has {int(lens[request])} keys, {int(counts[request])} pages of "
            f"{page_size}, and {int(room[request])} entries in the page_table: give it more"
        )
    unseen = torch.zeros_like(counts)
    if call.window is not None:  # pages before a window may be anything: engines reuse them
        q_lens = 1 if call.cu_q_lens is None else call.cu_q_lens.cpu().long().diff()
        unseen = ((lens - q_lens - int(call.window) + 1).clamp(min=0) // page_size).minimum(counts)
    rows = zip(starts.tolist(), unseen.tolist(), counts.tolist(), strict=True)
    for request, (start, begin, count) in enumerate(rows):
        row = table[request] if call.page_indptr is None else table[start:]
        entry = first((row[begin:count] < 0) | (row[begin:count] >= num_pages))
        if entry is not None:
            raise ArgumentError(
                f"request {request} has page {int(row[begin + entry])} at its entry "
                f"{begin + entry}, wanted 0 to {num_pages - 1}: correct the page_table"
            )
