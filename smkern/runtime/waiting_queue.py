"""Requests that wait, in the order in which they are served, and what a policy sees of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from smkern.errors import ArgumentError, SmkernError
from smkern.kv.page_pool import PagePool
from smkern.policies import Order, Waiting
from smkern.policies.order import checked_key
from smkern.runtime.request import Request

SEEN = 256
"""Requests of the queue that a policy is shown: a step's host time must not grow with the queue."""
FOUND = 16_384
"""Tokens of prompts that one `views` finds in the pool, about: hashing the names of so many takes
2 ms of a step."""


class WaitingQueue:
    """A sorted queue: priority, then the policy's order, then arrival.

    A request's key is made when it comes and when what a policy sees of it changes, so a change
    costs O(log n) comparisons, however many wait. The views of the first `SEEN` are kept beside the
    queue: a snapshot copies them.

    What a prompt may find in the pool is looked up once, when it comes among the first: the names
    of its blocks are hashed then, which its admission needs anyway, and not for a long queue. Where
    many come at once with prefixes that are known, some are looked up at a later `views`.

    Args:
        pool: Where prefixes are looked up.
        order: The policy's key of a request.
        failed: Told an error of the order, whose request keeps its place by arrival.

    Attributes:
        requests: Those that wait, the first to be served first; to be read only.
    """

    def __init__(self, pool: PagePool, order: Order, failed: Callable[[SmkernError], None]) -> None:
        self.requests: list[Request] = []
        self._pool = pool
        self._order = order
        self._failed = failed
        self._keys: list[tuple[int, float, float, int]] = []
        self._seen: list[Waiting] = []
        self._views: tuple[Waiting, ...] | None = ()
        # Requests that came among the first, and whose prefix may not have been looked up.
        self._new: deque[Request] = deque()

    def add(self, request: Request) -> None:
        """Put a request into the queue."""
        view = request.view(self._pool.pages_for)
        key = request.queue_key = self._key(request, view)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self.requests.insert(at, request)
        if at < SEEN:
            self._seen.insert(at, view)
            del self._seen[SEEN:]
            self._comes_first(request)

    def remove(self, request: Request) -> None:
        """Take a request out of the queue."""
        at = self._place(request)
        request.queue_key = None
        del self._keys[at], self.requests[at]
        if at < SEEN:
            del self._seen[at]
            if len(self.requests) >= SEEN:
                next_one = self.requests[SEEN - 1]
                self._seen.append(next_one.view(self._pool.pages_for))
                self._comes_first(next_one)
            self._views = None

    def look_again(self, request: Request) -> None:
        """What a policy sees of a request has changed, and where it waits may have too."""
        request.forget_view()
        key = request.queue_key
        if key is None:
            return
        view = request.view(self._pool.pages_for)
        if self._key(request, view) != key:
            self.remove(request)
            self.add(request)
            return
        at = self._place(request)
        if at < SEEN:
            self._seen[at] = view
            self._views = None

    def views(self) -> tuple[Waiting, ...]:
        """What a policy sees of those that wait: the first of them, however many there are."""
        found = 0
        while self._new and found < FOUND:
            request = self._new.popleft()
            self._look_up(request)
            found += request.num_expected or 0
        if self._views is None:
            self._views = tuple(self._seen)
        return self._views

    def look_up_again(self, request: Request) -> None:
        """Ask the pool again how much of a prompt others hold: some begin, some leave."""
        if request.num_expected is None or request.chain is None:
            return
        shared = self._pool.shared_pages(request.chain, request.num_shared)
        if shared != request.num_shared:
            request.num_shared = shared
            request.num_expected = max(request.num_expected, shared * self._pool.page_size)
            self.look_again(request)

    def _comes_first(self, request: Request) -> None:
        self._views = None
        if request.num_expected is None:
            self._new.append(request)

    def _look_up(self, request: Request) -> None:
        """Ask the pool what it holds of a prompt, whose place may change by it."""
        if request.queue_key is None or request.num_expected is not None or request.room:
            return
        request.num_expected = 0
        if self._pool.reuse:
            if request.chain is None:
                request.chain = self._pool.chain(request.ids)
            found = request.num_expected = self._pool.match_prefix(request.chain)
            request.num_shared = self._pool.shared_pages(request.chain, self._pool.pages_for(found))
        if request.num_expected:
            self.look_again(request)

    def _place(self, request: Request) -> int:
        assert request.queue_key is not None, request
        at = bisect_left(self._keys, request.queue_key)
        assert self.requests[at] is request, request
        return at

    def _key(self, request: Request, view: Waiting) -> tuple[int, float, float, int]:
        try:
            key = checked_key(self._order, view)
        except Exception as error:  # noqa: BLE001  an order of the user's may raise anything
            key = request.arrival_us
            if not isinstance(error, ArgumentError):
                error = ArgumentError(
                    f"the order raised {type(error).__name__} for request {request.index}: {error}"
                )
            self._failed(error)
        return (-request.priority, key, request.arrival_us, request.index)
