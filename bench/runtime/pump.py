"""Keeping both lanes busy: the loop of a runtime whose policy never changes its mind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from smkern.bench.runtime.side import Side
from smkern.bench.runtime.stamps import Stamps
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver, Ticket
from smkern.runtime.place import Lane, Place

LEAST = 16
"""Launches of a lane from which figures are made."""


@dataclass(slots=True)
class Feed:
    """What a lane is kept busy with.

    Attributes:
        lane: Which.
        depth: Launches that are kept queued.
        works: One behind another; ends where nothing more is to be launched.
        launched: How many were.
    """

    lane: Lane
    depth: int
    works: Iterator[Work]
    launched: int = 0
    _next: Work | None = field(default=None)

    def top_up(self, lanes: Interleaver) -> None:
        """Launch until `depth` are queued, or the lane has no SMs now."""
        while lanes.queued(self.lane) < self.depth and self.launch(lanes):
            pass

    def launch(self, lanes: Interleaver) -> bool:
        """Launch the next work; False where there is none, or the lane has no SMs now."""
        if self._next is None:
            self._next = next(self.works, None)
        if self._next is None or not lanes.can_launch(self.lane, self._next):
            return False
        lanes.launch(self.lane, self._next)
        self._next = None
        self.launched += 1
        return True


def pump(
    lanes: Interleaver,
    feeds: Sequence[Feed],
    go_on: Callable[[], bool],
    on_over: Callable[[Ticket], None] | None = None,
) -> None:
    """Poll, top up, wait, over and over while `go_on()`; then wait until all is over."""
    while go_on():
        for ticket in lanes.poll():
            if on_over is not None:
                on_over(ticket)
        for feed in feeds:
            feed.top_up(lanes)
        lanes.wait()
    lanes.drain()


def for_a_while(seconds: float, *feeds: Feed, launches: int = LEAST) -> Callable[[], bool]:
    """Whether to go on: so many seconds and so many launches of each feed are not all over."""
    end = time.monotonic() + seconds

    def go_on() -> bool:
        return time.monotonic() < end or any(feed.launched < launches for feed in feeds)

    return go_on


def decode_steps(side: Side) -> Iterator[Work]:
    """Decode steps without end."""
    return cycle([Work("decode", side.decode)])


def prompt_groups(side: Side, group: int, ends: Stamps | None) -> Iterator[Work]:
    """Groups of a prompt's layers, prompt after prompt without end; each group's end stamped."""
    return cycle(groups_of_one(side, group, ends))


def groups_of_one(side: Side, group: int, ends: Stamps | None) -> list[Work]:
    """The groups of one prompt."""
    works = []
    for first in range(0, side.num_layers, group):
        count = min(group, side.num_layers - first)
        run = _group(side, first, count, ends)
        works.append(Work("prefill", run, launches=16 * count, about={"first": first}))
    return works


def _group(side: Side, first: int, count: int, ends: Stamps | None) -> Callable[[Place], None]:
    def run(place: Place) -> None:
        side.layers(first, count, place)
        if ends is not None:
            ends.mark()

    return run
