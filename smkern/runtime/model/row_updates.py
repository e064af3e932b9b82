"""Changes of rows of requests, collected on the host and made on the device by one launch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from smkern.kernels.slots_launch import FINISHED, RECORD, SET_FINISHED, SET_VALUES
from smkern.runtime.model.row_state import RowState

STAGE_WORDS = 16_384
"""Words that one launch reads: 64 KiB, or 500 requests that come with 8 pages each."""


@dataclass(slots=True, eq=False)
class Records:
    """What one launch changes: no row is read that another of its records writes.

    Attributes:
        words: The records, `RECORD` words each, one behind another.
        numbers: The values and page ids that they name.
        sources, targets: Rows read and written.
    """

    words: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    targets: set[int] = field(default_factory=set)


class Sender(Protocol):
    """Makes the changes, in the order of the current stream."""

    @property
    def nbytes(self) -> int:
        """Device memory of its own, bytes."""
        ...

    def send(self, records: Records) -> None:
        """Change the rows behind what the current stream has."""
        ...


class HostSender:
    """Makes changes of rows on a CPU, in plain torch."""

    __slots__ = ("_begins", "_state", "_steps")

    def __init__(self, state: RowState) -> None:
        begins, steps = zip(*state.layout.steps, strict=True)
        self._state = state
        self._begins, self._steps = torch.tensor(begins), torch.tensor(steps)

    @property
    def nbytes(self) -> int:
        """Nothing."""
        return 0

    def send(self, records: Records) -> None:
        """Change the rows; all is over when this returns."""
        for at in range(0, len(records.words), RECORD):
            self._change(records.words[at : at + RECORD], records.numbers)

    def _change(self, record: Sequence[int], numbers: list[int]) -> None:
        target, source, flags, taken, first, count, pages_at, values_at = record
        state = self._state
        where = self._begins + target * self._steps
        if source >= 0:
            state.words[where] = state.words[self._begins + source * self._steps]
            state.finished[target] = state.finished[source]
            state.page_table[target, :taken] = state.page_table[source, :taken]
            state.finished[source] = True
        if flags & SET_VALUES:
            state.words[where] = torch.tensor(
                numbers[values_at : values_at + state.layout.values], dtype=torch.int32
            )
        if flags & SET_FINISHED:
            state.finished[target] = bool(flags & FINISHED)
        if count:
            entries = torch.tensor(numbers[pages_at : pages_at + count], dtype=torch.int32)
            state.page_table[target, first : first + count] = entries


class RowUpdate:
    """Changes of rows, to be sent once on the stream of the launch that needs them.

    Attributes:
        sent: Whether they were.
    """

    __slots__ = ("_before", "_made", "_most", "_sender", "launches", "ordered", "sent")

    def __init__(self, state: RowState, sender: Sender, before: deque[RowUpdate] | None) -> None:
        self.launches: list[Records] = []
        self.sent = False
        self.ordered = False
        """Whether updates of slots that were taken earlier must be sent before."""
        self._before = before
        self._made = 0
        """Launches that the sender has taken."""
        self._sender = sender
        self._most = STAGE_WORDS - RECORD - state.layout.values

    @property
    def has_any(self) -> bool:
        """Whether anything is to be sent, of this or of updates that go before it."""
        return not self.sent and (self.ordered or bool(self.launches))

    def put(
        self,
        target: int,
        source: int = -1,
        taken: int = 0,
        flags: int = 0,
        values: tuple[int, ...] | None = None,
        first: int = 0,
        pages: Sequence[int] = (),
    ) -> None:
        """One row's change.

        Args:
            target: The row.
            source: Row whose values, finished and first `taken` page entries it takes; that row is
                finished then. -1: none.
            taken: Page entries to take.
            flags: `SET_VALUES` and the like.
            values: Packed; None: they stay.
            first: Entry of the first of `pages`.
            pages: Page ids.
        """
        records = self._records(target, source)
        numbers = records.numbers
        values_at = len(numbers)
        if values is not None:
            flags |= SET_VALUES
            numbers += values
        room = STAGE_WORDS - len(records.words) - RECORD - len(numbers)
        now = pages if len(pages) <= room else pages[:room]
        records.words += (target, source, flags, taken, first, len(now), len(numbers), values_at)
        numbers += now
        records.targets.add(target)
        if source >= 0:
            records.sources.add(source)
        if len(now) < len(pages):
            self.launches.append(Records())
            self.put(target, first=first + len(now), pages=pages[len(now) :])

    def send(self) -> None:
        """Make the changes, in the order of the current stream; a second time does nothing.

        Where the sender raises, what it has not taken is sent another time: by this, or with the
        next update in order.
        """
        if self.ordered and self._before is not None:
            while self._before and not self.sent:
                self._before[0]._send()
                self._before.popleft()
        self._send()

    def _send(self) -> None:
        while self._made < len(self.launches):
            self._sender.send(self.launches[self._made])
            self._made += 1
        self.sent = True

    def _records(self, target: int, source: int) -> Records:
        """The records of a launch that may hold the change."""
        if self.launches:
            last = self.launches[-1]
            full = len(last.words) + len(last.numbers) > self._most
            targets = last.targets
            if not (full or target in targets or source in targets or target in last.sources):
                return last
        self.launches.append(Records())
        return self.launches[-1]
