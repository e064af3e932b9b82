"""From a mask's numbers to what `paged_attention` reads: lengths, and which keys a row has.

A dense cache [batch, kv_heads, S, head_dim] is seen as pages of one token, so that a row's page
table lists the keys that count and leaves padding out. Where all count, the table is a range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pattern:
    """Which keys a query may see, padding aside.

    Attributes:
        causal: Those up to its own position; else all.
        window: Only those above its position - window; None: no limit.
    """

    causal: bool
    window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest:
    """What transformers asked a mask for.

    Attributes:
        batch: Rows.
        q_length: Query tokens of each row.
        kv_length: Keys of each row in the cache, also those that nothing was written to yet.
        q_offset: Position of the first query; a tensor for static caches, whose length is on the
            device.
        kv_offset: Position of the first key.
        pattern: Which keys a query may see.
        padding: bool [batch, kv_length], False where a key is padding; None: none is.
        device: Where the cache is.
    """

    batch: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    pattern: Pattern
    padding: Tensor | None
    device: torch.device

    @property
    def first(self) -> int | Tensor:
        """Index of the first query's own key among the keys."""
        return self.q_offset - self.kv_offset


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One forward's attention, for all its layers.

    Attributes:
        request: What it was made for.
        kv_lens: int32 [batch], keys that count.
        order: int32 [batch, kv_length], the index of each of them, in order; None: 0, 1, 2, ...
        cu_q_lens: int32 [batch + 1], or None for one query token a row.
        causal: As `paged_attention` means it: bottom right.
        window: Likewise; None also where `order` leaves out already what is too old.
        max_kv_len: A bound of `kv_lens`.
        tables: Page tables by the pitch of a row, made by the first layer that needs them.
        plans: Plans by their numbers, likewise.
    """

    request: MaskRequest
    kv_lens: Tensor
    order: Tensor | None
    cu_q_lens: Tensor | None
    causal: bool
    window: int | None
    max_kv_len: int
    tables: dict[Any, Tensor] = field(default_factory=dict)
    plans: dict[Any, Any] = field(default_factory=dict)


def make_step(request: MaskRequest) -> Step | None:
    """A step of a mask, or None where no page table can express it.

    Where several query tokens meet padding the device is waited for, to see what kind it is; a
    step of one token, and any without padding, reads nothing back.

    None: padding between the new tokens of a row; padding amid the keys of a window, for several
    tokens; queries beyond the keys; and several tokens with padding in a graph capture.
    """
    if isinstance(request.q_offset, int) and request.pattern.causal:
        first = request.q_offset - request.kv_offset
        if first < 0 or first + request.q_length > request.kv_length:
            return None
    if request.padding is None:
        return _unpadded(request)
    if request.q_length == 1 or not request.pattern.causal:
        return _listed(request, _seen_at_once(request), None)
    return _new_tokens(request)


def _unpadded(request: MaskRequest) -> Step:
    length: int | Tensor = request.kv_length
    if request.pattern.causal:
        length = request.first + request.q_length
    size = (request.batch,)
    if isinstance(length, Tensor):
        lens = length.reshape(1).clamp(max=request.kv_length).to(torch.int32).expand(size)
        return _step(request, lens.contiguous(), None, request.pattern.window, request.kv_length)
    lens = torch.full(size, length, dtype=torch.int32, device=request.device)
    return _step(request, lens, None, request.pattern.window, length)


def _seen_at_once(request: MaskRequest) -> Tensor:
    """Keys that the one query token of a row sees, or all of them: bool [batch, kv_length]."""
    seen = _padding(request)
    if not request.pattern.causal:
        return seen
    keys = torch.arange(request.kv_length, device=request.device)
    seen = seen & (keys <= request.first)
    window = request.pattern.window
    return seen if window is None else seen & (keys > request.first - window)


def _new_tokens(request: MaskRequest) -> Step | None:
    """Several causal query tokens a row, some keys being padding.

    Token t sees the first kv_len - q_length + t + 1 keys of its row's list, so each of the row's
    new tokens must add one key to it: padding may come before them and behind them. What is behind
    is listed like a key, since only padding comes after it.
    """
    if request.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    keys = torch.arange(request.kv_length, device=request.device)
    new, before_end = keys >= request.first, keys < request.first + request.q_length
    padding = _padding(request)
    begun = (padding & new).cumsum(1) > 0
    seen = torch.where(new, begun, padding) & before_end
    resumed = padding[:, 1:] & ~padding[:, :-1] & begun[:, :-1] & before_end[1:]
    broken = seen[:, :-1] & ~seen[:, 1:] & before_end[1:] & begun[:, -1:]
    facts = torch.stack([resumed.any(), broken.any(), (seen == before_end).all()])
    has_gap, is_broken, is_whole = facts.tolist()
    window = request.pattern.window
    if has_gap or (is_broken and window is not None):
        return None
    if is_whole:
        return _unpadded(request)
    return _listed(request, seen, window)


def _padding(request: MaskRequest) -> Tensor:
    assert request.padding is not None
    return request.padding.expand(request.batch, request.kv_length)


def _listed(request: MaskRequest, seen: Tensor, window: int | None) -> Step:
    """A step whose rows list the keys that are seen."""
    places = seen.cumsum(1)
    lens = places[:, -1].to(torch.int32)
    keys = torch.arange(request.kv_length, dtype=torch.int32, device=request.device)
    # keys that are not seen are written to a column of their own, behind the others
    order = keys.new_zeros(request.batch, request.kv_length + 1)
    columns = torch.where(seen, places - 1, request.kv_length)
    order.scatter_(1, columns, keys.expand(request.batch, -1))
    return _step(request, lens, order[:, :-1], window, request.kv_length)


def _step(
    request: MaskRequest, lens: Tensor, order: Tensor | None, window: int | None, max_kv_len: int
) -> Step:
    starts = None
    if request.q_length != 1:
        ends = (request.batch + 1) * request.q_length
        starts = torch.arange(0, ends, request.q_length, dtype=torch.int32, device=request.device)
    return Step(request, lens, order, starts, request.pattern.causal, window, max_kv_len)
