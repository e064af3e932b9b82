"""Which request decodes in which slot, and its keys once all that was launched is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smkern.runtime.model.input_batch import InputBatch
from smkern.runtime.request import Request


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """Requests in slots, from one change of who decodes to the next.

    Attributes:
        requests: As they were named.
        rows: The same by slot.
        before: Keys of each of `requests` in the first step, its last token included.
        most: Keys that each gets at most: then it ends on the device.
        steps: Steps launched since.
    """

    requests: tuple[Request, ...]
    rows: tuple[Request, ...]
    before: list[int]
    most: list[int]
    steps: int = 0
    _numbers: tuple[Any, Any] = field(init=False)
    _longest: int = field(init=False)
    _total: int = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = np.array(self.before, np.int64), np.array(self.most, np.int64)
        self._longest, self._total = max(self.before, default=0), sum(self.before)

    @property
    def longest(self) -> int:
        """A bound of the keys of each in the next step."""
        return self._longest + self.steps

    @property
    def total(self) -> int:
        """A bound of the keys of all in the next step."""
        return self._total + self.steps * len(self.before)

    @property
    def lengths(self) -> list[int]:
        """Bounds of the keys of each in the next step."""
        return [length + self.steps for length in self.before]

    def ends(self, steps: int) -> Any:
        """Keys of each when so many more steps are over, an array."""
        before, most = self._numbers
        return np.minimum(before + (self.steps + steps - 1), most)


class DecodeSlots:
    """Gives requests slots, and counts the keys that launches add.

    The host may be some launches behind: a request that sits, or that a mixed forward has just
    drawn for, has on the device what the next launch needs. One that comes from elsewhere brings
    what the host knows.

    Args:
        table: The rows.
    """

    def __init__(self, table: InputBatch) -> None:
        self.table = table
        self._now = DecodeBatch((), (), [], [])
        # Of those that sat: they come anew, or not at all.
        self._gone: set[Request] = set()
        self._prefill_rows: dict[Request, tuple[int, int]] = {}
        """Row and keys of those that a mixed forward drew for and that sit in no slot yet."""

    def arrange(self, requests: Sequence[Request], steps: int) -> DecodeBatch:
        """Seat these requests, and their pages for so many steps; others leave.

        Raises:
            ArgumentError: more requests than slots, or pages that are not there.
        """
        asked = tuple(requests)
        same = self.go_on(asked, steps)
        if same is not None:
            return same
        now = self._now
        known = dict(zip(now.requests, now.lengths, strict=True))
        for request in self._gone:
            known.pop(request, None)
        most = dict(zip(now.requests, now.most, strict=True))
        prefill_rows = (
            {x: self._prefill_rows[x] for x in asked if x in self._prefill_rows}
            if self._prefill_rows
            else {}
        )
        known.update((request, length) for request, (_, length) in prefill_rows.items())
        before = [known.get(request) or len(request.ids) for request in asked]
        ends = [most.get(request) or request.max_tokens_held for request in asked]
        new = DecodeBatch(asked, (), before, ends)
        rows = {request: row for request, (row, _) in prefill_rows.items()}
        new.rows = self.table.arrange(asked, new.ends(steps), rows)
        for request in prefill_rows:
            del self._prefill_rows[request]
        self._now = new
        self._gone.clear()
        return new

    def go_on(self, requests: tuple[Request, ...], steps: int) -> DecodeBatch | None:
        """Write down the pages of the next steps, where these go on as they sit; None: others do.

        Raises:
            ArgumentError: pages that are not there.
        """
        if requests != self._now.requests or not self.stays(self._now):
            return None
        self.table.grow(self._now.ends(steps))
        return self._now

    def stays(self, seated: DecodeBatch) -> bool:
        """Whether nobody has come, left or moved since an arrangement."""
        return seated is self._now and not self._prefill_rows and not self._gone

    def drew(self, request: Request, row: int, length: int) -> None:
        """A mixed forward was launched that draws for a prefill row.

        Args:
            request: The prefill row.
            row: Where it sits.
            length: Its keys in the next step.
        """
        self._prefill_rows[request] = row, length

    def drop_prefill_rows(self) -> None:
        """Guests that were not seated lose their rows: they come again from the host."""
        self._prefill_rows.clear()

    def forget(self, request: Request) -> None:
        """A request has left."""
        self.table.forget(request)
        self._prefill_rows.pop(request, None)
        if request in self._now.requests:
            self._gone.add(request)
