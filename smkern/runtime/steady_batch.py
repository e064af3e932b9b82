"""Requests that decode step after step while none comes or goes, as numbers of them all."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from smkern.runtime.queues import RequestQueues
from smkern.runtime.request import Request


class SteadyBatch:
    """What every decode step needs to know of its requests, without a look at each of them.

    Between the end of a step and the launch of the next, 128 requests would be asked for their
    lengths, room and tokens left, and their objects have left the caches since the last step. All
    of these move by one a step, so here they are kept once: from a launch that drew for all that
    run, until a request comes or goes.

    Made when nothing is owed to the requests: neither tokens nor launches.

    Args:
        queues: Their queues: all that run.
        rows: The requests by row of the last launch.
        left: Tokens that each request of `queues.running` will lack when all that is launched is
            over.

    Attributes:
        requests: All that run, in their order.
        rows: As given.
        preemptions: How often each of `rows` had begun anew.
        launched: Steps since this was made.
        version: The queues' version at which these were known to run.
        token_us: When the last token of one of these steps was seen; 0: none was yet.
    """

    __slots__ = (
        "_base", "_counted", "_due", "_is_plain", "_left", "_longest", "_stops", "launched",
        "least_left", "most_left", "preemptions", "requests", "rows", "token_us", "version",
    )  # fmt: skip

    def __init__(
        self, queues: RequestQueues, rows: tuple[Request, ...], left: Sequence[int]
    ) -> None:
        self.requests = tuple(queues.running)
        self.rows = rows
        self.launched = 0
        self.token_us = 0.0
        self.least_left, self.most_left = min(left), max(left)
        self.version = queues.version
        self.preemptions = [request.num_preemptions for request in rows]
        self._left = left
        self._base = [request.num_tokens for request in self.requests]
        self._longest = max(self._base)
        self._counted: tuple[int, tuple[int, ...]] = 0, tuple(self._base)
        # steps that a request's pages have room for, and which request it is
        self._due = [(x.room - self._base[i], i) for i, x in enumerate(self.requests)]
        heapify(self._due)
        self._stops = frozenset().union(*[request.stop_token_ids for request in self.requests])
        # A text may end at any token, and what is drawn again must be compared.
        self._is_plain = not any(
            request.to_repeat or (request.detokenizer is not None and request.params.stops)
            for request in self.requests
        )

    def is_valid(self, queues: RequestQueues) -> bool:
        """Whether these run, and no others, at another version: one that came may have gone."""
        if list(self.requests) != queues.running:
            return False
        if [request.num_preemptions for request in self.rows] != self.preemptions:
            return False
        self.version = queues.version
        return True

    def advance(self, steps: int = 1) -> int:
        """Steps were launched; the last one's number, 1 for the first since this was made."""
        self.launched += steps
        self.least_left -= steps
        self.most_left -= steps
        return self.launched

    def skip(self, queues: RequestQueues, steps: int) -> None:
        """So many steps were launched, and their requests told of them; pages are plenty."""
        self.advance(steps)
        self.count()
        has_room = self.extend(queues, 1)
        assert has_room, "pages of steps that were skipped"

    @property
    def longest(self) -> int:
        """The largest of `lengths`."""
        return self._longest + self.launched

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each when all that is launched is over."""
        if self._counted[0] != self.launched:
            self.count()
        return self._counted[1]

    def count(self) -> None:
        """Count these tokens: while the device computes, not when they are asked for."""
        more = self.launched
        self._counted = more, tuple([length + more for length in self._base])

    def stays(self, tokens: Sequence[int], number: int) -> bool:
        """Whether none of the requests ends by the tokens of a step.

        Args:
            number: The step's number, as `advance` gave it.
        """
        is_before_ends = number < self.least_left + self.launched
        return self._is_plain and is_before_ends and self._stops.isdisjoint(tokens)

    def extend(self, queues: RequestQueues, steps: int) -> bool:
        """Get pages for so many more steps of all; False, with nothing changed, if they lack."""
        reach, due = self.launched + steps - 1, self._due
        if due[0][0] >= reach:
            return True
        needs: dict[Request, int] = {}
        looked_at: list[int] = []
        while due and due[0][0] < reach:
            index = heappop(due)[1]
            looked_at.append(index)
            request = self.requests[index]
            tokens = self._base[index] + min(reach, self._left[index] - 1)
            if tokens > request.room:
                needs[request] = tokens
        has_room = not needs or queues.extend(needs)
        for index in looked_at:
            heappush(due, (self.requests[index].room - self._base[index], index))
        return has_room
