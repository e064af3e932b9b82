"""Which waiting requests a batch of prompts takes: in their order, none passed over."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.policies.check import rows_left
from smkern.policies.snapshot import Snapshot, Waiting

Batch = tuple[Waiting, ...]
"""Requests that begin together, the first served first."""


def admitted(snapshot: Snapshot, tokens: int, waiting: Iterable[Waiting] | None = None) -> Batch:
    """The first waiting requests that may begin together.

    As many as have a decode row, a place in the batch, pages, and a share of the tokens; the last
    may be cut. The first that does not fit ends the batch: one that is passed over while small
    ones come could wait for ever.

    Args:
        tokens: New tokens of the batch, at most.
        waiting: Those that may be taken, in their order; None: all.
    """
    rows = min(snapshot.max_prefill, rows_left(snapshot))
    pages = snapshot.free_pages - growth_pages(snapshot)
    chosen: list[Waiting] = []
    for request in snapshot.waiting if waiting is None else waiting:
        pages -= request.pages
        if len(chosen) == rows or pages < 0 or tokens <= 0:
            break
        chosen.append(request)
        tokens -= request.tokens
    return tuple(chosen)


def growth_pages(snapshot: Snapshot) -> int:
    """Pages that are left to requests that decode, one each, so that none must be preempted for a
    prompt as soon as it has begun; none where nothing runs, so that the first is always taken."""
    return snapshot.batch


def chunks_of(waiting: Iterable[Waiting], tokens: int) -> list[tuple[int, int]]:
    """(new tokens, cached tokens) of each, `tokens` new ones at most; the last is cut."""
    chunks: list[tuple[int, int]] = []
    for request in waiting:
        new = min(request.tokens, tokens)
        if new <= 0:
            break
        chunks.append((new, request.cached))
        tokens -= new
    return chunks


def taken(batch: Batch, tokens: int) -> Batch:
    """Those of a batch that have a share of so many new tokens."""
    for count, request in enumerate(batch, 1):
        tokens -= request.tokens
        if tokens <= 0:
            return batch[:count]
    return batch


def ids_of(waiting: Iterable[Waiting]) -> tuple[int, ...]:
    return tuple(request.id for request in waiting)


def whole_prompts(
    snapshot: Snapshot, tokens: int, waiting: Iterable[Waiting] | None = None
) -> tuple[Batch, int]:
    """As `admitted`, but no prompt is cut that the buffers hold: the last that would be waits for
    the next batch, and a longer one than `tokens` comes alone.

    Returns:
        The requests, and how many new tokens their batch holds at most.
    """
    batch = admitted(snapshot, tokens, waiting)
    if len(batch) > 1 and sum(request.tokens for request in batch) > tokens:
        return batch[:-1], tokens
    longest = batch[0].tokens if batch else tokens
    return batch, min(max(longest, tokens), snapshot.max_tokens)
