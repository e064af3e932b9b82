"""Which request decodes in which slot, from one change of them to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smkern.runtime.model.input_batch import InputBatch
from smkern.runtime.request import Request


@dataclass(slots=True, eq=False)
class DecodeBatch:
    """Requests in slots, with numbers of them all, so that a step looks at none by itself.

    Attributes:
        requests: In the order in which they were named.
        rows: The same by slot.
        steps: Steps launched since this was made.
        longest: A bound of the keys of each in the next step.
        total: A bound of the keys of all in the next step.
    """

    requests: tuple[Request, ...]
    rows: tuple[Request, ...] = ()
    steps: int = 0
    longest: int = field(init=False)
    total: int = field(init=False)
    _lengths: Any = field(init=False)
    _most: Any = field(init=False)

    def __post_init__(self) -> None:
        # Keys of each in the first step, its last token included; at the most it ends there.
        lengths = [request.num_tokens for request in self.requests]
        self._lengths = np.array(lengths, np.int64)
        self._most = np.array([request.max_tokens_held for request in self.requests], np.int64)
        self.longest, self.total = max(lengths, default=0), sum(lengths)

    @property
    def lengths(self) -> list[int]:
        """Bounds of the keys of each in the next step."""
        lengths: list[int] = (self._lengths + self.steps).tolist()
        return lengths

    def ends(self, steps: int) -> Any:
        """Keys of each when so many more steps are over, an array."""
        return np.minimum(self._lengths + (self.steps + steps - 1), self._most)

    def advance(self) -> None:
        """A step was launched."""
        self.steps += 1
        self.longest += 1
        self.total += len(self.requests)


class DecodeSlots:
    """Gives requests that decode their slots.

    The host may be some launches behind: a request that has a slot, or that a mixed forward has
    just drawn for, has on the device what the next launch needs. One that comes from elsewhere
    brings what the host knows.
    """

    def __init__(self, table: InputBatch) -> None:
        self.table = table
        self._now: DecodeBatch | None = None
        self._prefill_rows: dict[Request, int] = {}
        """Rows of requests that a mixed forward drew for and that have no slot yet."""

    def arrange(self, requests: Sequence[Request], steps: int) -> DecodeBatch:
        """Give these requests slots, and write their pages for so many steps; others leave.

        Raises:
            ArgumentError: more requests than slots, or pages that are not there.
        """
        asked = tuple(requests)
        same = self.go_on(asked, steps)
        if same is not None:
            return same
        rows = {x: self._prefill_rows[x] for x in asked if x in self._prefill_rows}
        new = DecodeBatch(asked)
        new.rows = self.table.arrange(asked, new.ends(steps), rows)
        for request in rows:
            del self._prefill_rows[request]
        self._now = new
        return new

    def go_on(self, requests: tuple[Request, ...], steps: int) -> DecodeBatch | None:
        """Write the pages of the next steps, where these go on in their slots; None: others do.

        Raises:
            ArgumentError: pages that are not there.
        """
        now = self._now
        if now is None or requests != now.requests or self._prefill_rows:
            return None
        self.table.grow(now.ends(steps))
        return now

    def stays(self, batch: DecodeBatch) -> bool:
        """Whether no request has come, left or moved since a batch was arranged."""
        return batch is self._now and not self._prefill_rows

    def drew(self, request: Request, row: int) -> None:
        """A mixed forward was launched that draws for a request in a prefill row."""
        self._prefill_rows[request] = row

    def drop_prefill_rows(self) -> None:
        """Requests in prefill rows that got no slot lose them: they come again from the host."""
        self._prefill_rows.clear()

    def forget(self, request: Request) -> None:
        """A request has left."""
        self.table.forget(request)
        self._prefill_rows.pop(request, None)
        if self._now is not None and request in self._now.requests:
            self._now = None
