"""Which request is in which row: they come, move and leave; the device is told what changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from smkern.errors import ArgumentError
from smkern.kernels.slots_launch import FINISHED, SET_FINISHED
from smkern.kv import PagePool
from smkern.runtime.executor import PrefillChunk
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.row_updates import CudaSender, HostSender, RowChange, RowUpdate, Sender
from smkern.runtime.request import Request


class InputBatch:
    """The rows of a `RowState`: which request has which, and what of it the device knows.

    `arrange`, `grow` and `write_prefill_rows` take effect here at once and collect what the device
    must be told; `take` gives that, to be sent on the stream of the launch that needs it: one copy
    from pinned memory and one small kernel, no wait. What a launch leaves in a row (token, length,
    finished) stays there: a request that moves takes it along, so the host need not know it.
    Not for several threads at once.

    Args:
        state: The arrays.
        pool: The requests' pages.
        sender: Makes the changes. None: by the state's device.
        in_order: Whether prefill rows, too, are written behind all earlier changes, dropped ones
            included: where all updates of this table go to one stream.

    Attributes:
        state: As given.

    Example:
        >>> from smkern.kv import KvPool, KvSizes
        >>> from smkern.models import SamplingParams
        >>> from smkern.runtime.request import Request
        >>> pool = KvPool(KvSizes(1, num_kv_heads=1, head_dim=64), num_pages=8, device="cpu")
        >>> state = RowState.make(max_running=4, max_prefill=2, max_pages=4, device="cpu")
        >>> table = InputBatch(state, pool)
        >>> request = Request(0, SamplingParams(), 1, frozenset(), 9, [5, 6, 7], 3)
        >>> pool.allocate(request, request.ids)
        0
        >>> row = state.first_slot - 1
        >>> table.write_prefill_rows(row, [PrefillChunk(request, 0, 3, draws=True)])
        >>> table.take().send()                   # the prefill and its draw are launched behind it
        >>> order = table.arrange([request], [4], {request: row})
        >>> table.take().send()                   # decode graphs are launched behind it
        >>> state.inputs(state.first_slot, 2).finished.tolist()
        [False, True]
    """

    def __init__(
        self,
        state: RowState,
        pool: PagePool,
        *,
        sender: Sender | None = None,
        in_order: bool = False,
    ) -> None:
        self.state = state
        self._in_order = in_order
        self._pool = pool
        self._page_size = pool.page_size
        if sender is None:
            sender = HostSender(state) if state.device.type == "cpu" else CudaSender(state)
        self._sender = sender
        self._unsent: deque[RowUpdate] = deque()
        self._update = RowUpdate(state, self._sender, self._unsent)
        self._covered = np.zeros(state.num_rows, np.int64)
        """Tokens of each row whose pages are in the page table."""
        self._prefill_rows: dict[int, tuple[Request, RowUpdate]] = {}
        self._by_slot: list[Request | None] = []
        self._slots: dict[Request, int] = {}
        self._order: tuple[Request, ...] | None = ()
        """The last requests given, in their order; None: the rows must be looked at."""
        self._rows = np.zeros(0, np.int64)
        """The rows of `_order`."""

    @property
    def nbytes(self) -> int:
        """Device memory of the rows and of changes on their way, bytes."""
        return self.state.nbytes + self._sender.nbytes

    def arrange(
        self,
        requests: Sequence[Request],
        lengths: Sequence[int] | Any,
        prefill_rows: Mapping[Request, int] | None = None,
    ) -> tuple[Request, ...]:
        """Give the requests that decode slots without gaps, and write their pages.

        A request that has a slot keeps it and what the device has there; those that are not named
        leave; the last ones move into gaps. One that comes without a prefill row brings its last
        token and length from the host, which must know them: what was launched of it is read.

        Args:
            requests: At most `max_running`, each once.
            lengths: Tokens that the pages of each must hold after the launches to come; the pool
                gave it so many pages already. An array of numpy's is read fastest.
            prefill_rows: By request, the prefill row whose draw was launched: the request's state
                comes from there, on the device. Launched before this update is sent on another
                stream, it must be over.

        Returns:
            The requests by slot.

        Raises:
            ArgumentError: no request came or moved: too many requests, one twice, no length for
                one, a row that is no prefill row, or too few pages.
        """
        asked = tuple(requests)
        if prefill_rows or asked != self._order:
            self._check(asked, lengths, prefill_rows or {})
            self._assign_slots(asked, lengths, prefill_rows or {})
        self.grow(lengths)
        return tuple([x for x in self._by_slot if x is not None])

    def grow(self, lengths: Sequence[int] | Any) -> None:
        """Write pages that requests in slots got, where all keep their slots.

        Args:
            lengths: As in `arrange`, in the order of the requests of the last one.

        Raises:
            ArgumentError: no length for one, or too few pages.
        """
        if len(lengths) != len(self._rows):
            raise ArgumentError(
                f"{len(lengths)} lengths for {len(self._rows)} requests: pass one each, in the "
                "order of the last arrange"
            )
        wanted = np.asarray(lengths, np.int64)
        short = np.flatnonzero(wanted > self._covered[self._rows])
        if not short.size:
            return
        rows, slot = self._rows[short], self.state.first_slot
        changes, covered = [], self._covered[rows].tolist()
        for row, had, length in zip(rows.tolist(), covered, wanted[short].tolist(), strict=True):
            request = self._by_slot[row - slot]
            assert request is not None
            first, pages = self._lacking(had, request, length)
            changes.append(RowChange(row, first=first, pages=pages))
        self._put(self._slot_update(), changes)

    def write_prefill_rows(self, first_row: int, chunks: Sequence[PrefillChunk]) -> None:
        """Write the rows of a prefill batch, or of a mixed step's chunks, a chunk a row.

        A request that is in the row already, from its chunk before, sends new pages only. A row
        that does not draw is finished for the sampler, and keeps its length.

        Raises:
            ArgumentError: a row that is no prefill row, or too few pages.
        """
        for row, chunk in enumerate(chunks, first_row):
            request = chunk.request
            if not 0 <= row < self.state.first_slot:
                raise ArgumentError(
                    f"row {row} for {request!r}: prefill rows are 0 to "
                    f"{self.state.first_slot - 1}; take them from RowState.prefill_rows"
                )
            known = self._prefill_rows.get(row)
            is_new = known is None or known[0] is not request or not known[1].sent
            covered = 0 if is_new else int(self._covered[row])
            first, pages = self._lacking(covered, request, chunk.end)
            flags = SET_FINISHED | (0 if chunk.draws else FINISHED)
            values = self._values(request, chunk.end)
            update = self._slot_update() if self._in_order else self._update
            self._put(update, [RowChange(row, -1, 0, flags, values, first, pages)])
            self._prefill_rows[row] = request, self._update

    def take(self) -> RowUpdate:
        """What was collected since the last call, to be sent once.

        An update that is dropped goes with the next one of slots (`in_order`: the next one, also
        where that changes nothing); one of prefill rows is lost: `forget` its requests.
        """
        if self._in_order and self._unsent:
            self._slot_update()
        update = self._update
        self._update = RowUpdate(self.state, self._sender, self._unsent)
        return update

    def forget(self, request: Request) -> None:
        """A request has left, or has other pages from now on: it comes anew, or not at all."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._by_slot[slot] = None
            self._order = None
        for row in [row for row, known in self._prefill_rows.items() if known[0] is request]:
            del self._prefill_rows[row]

    def _check(
        self,
        asked: tuple[Request, ...],
        lengths: Sequence[int],
        prefill_rows: Mapping[Request, int],
    ) -> None:
        limit = self.state.max_running
        if len(asked) > limit:
            raise ArgumentError(
                f"{len(asked)} requests: {limit} rows decode at a time; leave some out, or raise "
                "max_running"
            )
        if len(set(asked)) < len(asked):
            twice = next(x for x in asked if asked.count(x) > 1)
            raise ArgumentError(f"{twice!r} is given twice: name each request once")
        if len(lengths) != len(asked):
            raise ArgumentError(
                f"{len(lengths)} lengths for {len(asked)} requests: pass one each, in their order"
            )
        for request, row in prefill_rows.items():
            known = self._prefill_rows.get(row)
            if known is None or known[0] is not request or request not in asked:
                raise ArgumentError(
                    f"{request!r} is not in prefill row {row}: name requests of this call that "
                    "write_prefill_rows wrote there, not moved, forgotten or overwritten since"
                )

    def _assign_slots(
        self,
        asked: tuple[Request, ...],
        given: Sequence[int] | Any,
        prefill_rows: Mapping[Request, int],
    ) -> None:
        """Give every request a row, and tell the device of those that are new in theirs."""
        before, old, first = self._by_slot, self._slots, self.state.first_slot
        wanted = dict(zip(asked, np.asarray(given, np.int64).tolist(), strict=True))
        came = [x for x in asked if x not in old or x in prefill_rows]
        by_slot = _without_gaps(
            [x if x in wanted and x not in prefill_rows else None for x in before], deque(came)
        )
        left = set(range(len(by_slot), len(before)))
        changes: list[RowChange] = []
        stays = [x is y and x not in prefill_rows for x, y in zip(by_slot, before, strict=False)]
        moved = [slot for slot, kept in enumerate(stays) if not kept]
        for slot in (*moved, *range(len(stays), len(by_slot))):
            request = by_slot[slot]
            source = prefill_rows.get(request, first + old[request] if request in old else -1)
            changes.append(self._change(first + slot, source, request, wanted[request]))
            left.discard(source - first)
        # nothing was changed before this: what could raise has not
        update = self._slot_update()
        self._put(update, changes)
        for change in changes:
            self._prefill_rows.pop(change.source, None)
        update.put([RowChange(first + slot, flags=SET_FINISHED | FINISHED) for slot in left])
        self._slots = dict(zip(by_slot, range(len(by_slot)), strict=True))
        self._by_slot, self._order = list(by_slot), asked
        self._rows = np.array([self._slots[request] for request in asked], np.int64) + first

    def _change(self, row: int, source: int, request: Request, length: int) -> RowChange:
        """How a request comes to a row: from another one, or (source -1) from the host."""
        if source < 0:
            first, pages = self._lacking(0, request, length)
            values = self._values(request, len(request.ids))
            return RowChange(row, -1, 0, SET_FINISHED, values, first, pages)
        covered = int(self._covered[source])
        first, pages = self._lacking(covered, request, length)
        return RowChange(row, source, covered // self._page_size, 0, None, first, pages)

    def _put(self, update: RowUpdate, changes: Sequence[RowChange]) -> None:
        update.put(changes)
        for change in changes:
            self._covered[change.row] = (change.first + len(change.pages)) * self._page_size

    def _lacking(self, covered: int, request: Request, length: int) -> tuple[int, tuple[int, ...]]:
        """The first entry and the ids of the pages that a row lacks for so many tokens."""
        size, limit = self._page_size, self.state.layout.max_pages
        first, end = covered // size, -(-length // size)
        if end <= first:
            return first, ()
        if end > limit:
            raise ArgumentError(
                f"{request!r} is to have {length} tokens: a row has {limit} pages of {size}; "
                "refuse it, or make the rows for longer requests"
            )
        pages = self._pool.pages(request, first, end)
        if len(pages) < end - first:
            raise ArgumentError(
                f"{request!r} is to have {length} tokens and has {first + len(pages)} pages of "
                f"{size}: extend it in the pool before"
            )
        return first, pages

    def _values(self, request: Request, length: int) -> tuple[int, ...]:
        params = request.params
        return self.state.layout.pack(
            request.ids[-1],
            length,
            min(request.prompt_len + request.max_new_tokens, 2**31 - 1),
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            request.seed,
            sorted(request.stop_token_ids),
        )

    def _slot_update(self) -> RowUpdate:
        """The update that is collected, which goes behind all earlier ones of slots."""
        if not self._update.ordered:
            self._update.ordered = True
            self._unsent.append(self._update)
        return self._update


def _without_gaps(rows: list[Request | None], came: deque[Request]) -> list[Request]:
    """Rows with those that came in the gaps, then at the end; the last ones close the rest."""
    if None not in rows:
        return [x for x in (*rows, *came) if x is not None]
    for slot, request in enumerate(rows):
        if request is None and came:
            rows[slot] = came.popleft()
    rows += came
    for slot in range(len(rows)):
        while rows and rows[-1] is None:
            rows.pop()
        if slot < len(rows) and rows[slot] is None:
            rows[slot] = rows.pop()
    return [x for x in rows if x is not None]
