"""Those that decode step after step while nobody comes or goes, as numbers of them all."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from smkern.runtime.live import Live, rows_of
from smkern.runtime.queues import RequestQueues
from smkern.runtime.request import Request


class SteadyBatch:
    """What every decode step needs to know of its requests, without a look at each of them.

    Between the end of a step and the launch of the next, 128 requests would be asked for their
    lengths, room and tokens left, and their objects have left the caches since the last step. All
    of these move by one a step, so here they are kept once: from a launch that drew for all that
    run, until somebody comes or goes.

    Made when nothing is owed to the requests: neither tokens nor launches.

    Args:
        books: Whose running requests these are.
        lives: All of them, in their order.
        order: Their requests by row of the last launch.
        left: Tokens that each will lack when all that is launched is over, in the order of `lives`.

    Attributes:
        lives, order: As given.
        requests: Of `lives`.
        rows: A request and its epoch by row.
        launched: Steps since this was made.
        token_us: When the last token of one of these steps was seen; 0: none was yet.
    """

    __slots__ = (
        "_base", "_counted", "_due", "_is_plain", "_left", "_page", "_stops", "_version",
        "launched", "lives", "order", "requests", "rows", "token_us",
    )  # fmt: skip

    def __init__(
        self, queues: RequestQueues, lives: list[Live], order: tuple[Request, ...], left: list[int]
    ) -> None:
        self.lives = lives
        self.requests = tuple([live.request for live in lives])
        self.order = order
        self.rows = rows_of(lives, order)
        self.launched = 0
        self.token_us = 0.0
        self._version = queues.version
        self._page = queues.pool.page_size
        self._left = min(left), max(left)
        self._base = [len(live.request.ids) + live.ahead for live in lives]
        self._counted: tuple[int, tuple[int, ...]] = 0, tuple(self._base)
        # steps that a request's pages have room for, and which it is
        self._due = [
            (live.room - n, i) for i, (live, n) in enumerate(zip(lives, self._base, strict=True))
        ]
        heapify(self._due)
        self._stops = frozenset().union(*[request.stop_token_ids for request in self.requests])
        # A text may end at any token, and what is drawn again must be compared.
        self._is_plain = not any(
            live.again or (live.request.detokenizer is not None and live.request.params.stops)
            for live in lives
        )

    def is_valid(self, queues: RequestQueues) -> bool:
        """Whether these run, and no others; who has come may have gone again."""
        if self._version == queues.version:
            return True
        if self.lives != queues.running or any(live.epoch != epoch for live, epoch in self.rows):
            return False
        self._version = queues.version
        return True

    @property
    def least_left(self) -> int:
        """Steps until the first of them may be at its end."""
        return self._left[0] - self.launched

    @property
    def most_left(self) -> int:
        """Steps until the last of them is at its end."""
        return self._left[1] - self.launched

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each when all that is launched is over."""
        if self._counted[0] != self.launched:
            self.count()
        return self._counted[1]

    def count(self) -> None:
        """Count these tokens: while the device computes, so that nobody waits who asks."""
        more = self.launched
        self._counted = more, tuple([length + more for length in self._base])

    def stays(self, tokens: Sequence[int], number: int) -> bool:
        """Whether none of them ends by the tokens of a step.

        Args:
            tokens: That it drew.
            number: Of the step, 1 for the first since this was made.
        """
        if not self._is_plain or number >= self._left[0]:
            return False
        return not self._stops or self._stops.isdisjoint(tokens)

    def extend(self, queues: RequestQueues, steps: int) -> bool:
        """Get pages for so many more steps of all; False, with nothing changed, if they lack."""
        reach, due = self.launched + steps - 1, self._due
        needs: list[tuple[Live, int, int]] = []
        missing = 0
        while due and due[0][0] < reach:
            index = heappop(due)[1]
            live = self.lives[index]
            tokens = min(self._base[index] + reach, live.request.max_tokens_held)
            missing += max(-(-tokens // self._page) - live.room // self._page, 0)
            needs.append((live, tokens, index))
        has_room = not missing or queues.has_pages(missing)
        for live, tokens, index in needs:
            if has_room and tokens > live.room:
                queues.extend(live, tokens)
            heappush(due, (live.room - self._base[index], index))
        return has_room
