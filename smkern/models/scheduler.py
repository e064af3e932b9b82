"""Which requests run next: continuous batching over a pool of pages, prompts first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from smkern.errors import OutOfPagesError
from smkern.kv import Event, KvPool
from smkern.models.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a prompt: `count` from `start` on."""

    request: Request
    start: int
    count: int

    @property
    def draws(self) -> bool:
        """Whether all tokens are computed behind it, so that the next is drawn."""
        return self.start + self.count == len(self.request.ids)


@dataclass(frozen=True, slots=True)
class Work:
    """One forward: chunks of prompts, or one token each of requests that decode.

    Attributes:
        chunks: A request each.
        decodes: Whether it is a decode step.
    """

    chunks: list[Chunk]
    decodes: bool


class Scheduler:
    """Admits requests while pages last, cuts prompts into chunks, and gives each token its page.

    First come, first served. Prompts run before decode steps. When a decoding request finds no
    page, the youngest one gives its pages back and waits to be computed again, at the front of the
    queue; its blocks stay cached as long as nobody needs them.

    Args:
        pool: Where the pages are.
        max_batch: Requests that run at a time.
        max_step_tokens: Tokens of a forward.
    """

    def __init__(self, pool: KvPool, max_batch: int, max_step_tokens: int) -> None:
        self._pool = pool
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        # The next request did not get its pages, and none have come back since.
        self._is_stuck = False

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    @property
    def running(self) -> Sequence[Request]:
        """Requests that hold pages, the oldest first."""
        return self._running

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue."""
        self._waiting.append(request)

    def next(self) -> Work:
        """The next forward; the pages that it writes are there.

        Raises:
            OutOfPagesError: a lone request does not get its pages: somebody else holds them.
        """
        self._admit()
        chunks = self._prompts()
        if chunks:
            return Work(chunks, decodes=False)
        return Work(self._decodes(), decodes=True)

    def done(self, work: Work) -> None:
        """A forward has been launched: its tokens are in their pages for all launches behind it."""
        for chunk in work.chunks:
            request, end = chunk.request, chunk.start + chunk.count
            self._pool.commit(request, request.ids[chunk.start : end])
            request.num_computed = end

    def drop_finished(self) -> None:
        """Give back the pages of finished requests, which no launch reads any more."""
        for request in self._running:
            if request.finish_reason is not None:
                self._pool.release(request)
                self._is_stuck = False
        self._running = [x for x in self._running if x.finish_reason is None]

    def abort(self, event: Event | None) -> None:
        """Drop all requests; their pages are free once `event` is over."""
        for request in self._running:
            self._pool.release(request, event)
        self._running.clear()
        self._waiting.clear()

    def _admit(self) -> None:
        if self._is_stuck and self._running:
            return
        while self._waiting and len(self._running) < self._max_batch:
            request = self._waiting[0]
            if request.chain is None:
                request.chain = self._pool.chain(request.ids)
            try:
                cached = self._pool.allocate(request, request.chain)
            except OutOfPagesError:
                if not self._running:
                    raise
                self._is_stuck = True
                return
            request.num_computed, request.chain = cached, None
            if request.cached_tokens is None:
                request.cached_tokens = cached
            self._running.append(self._waiting.popleft())

    def _prompts(self) -> list[Chunk]:
        chunks, room = [], self._max_step_tokens
        for request in self._running:
            if request.num_uncomputed > 1 and room:
                count = min(request.num_uncomputed, room)
                chunks.append(Chunk(request, request.num_computed, count))
                room -= count
        return chunks

    def _decodes(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        # Who makes room is the youngest, so never one in front of the request that needs it.
        while len(chunks) < len(self._running):
            request = self._running[len(chunks)]
            if self._extend(request):
                chunks.append(Chunk(request, request.num_computed, 1))
        return chunks

    def _extend(self, request: Request) -> bool:
        """A page for the request's next token; False if it had to make room itself."""
        while True:
            try:
                self._pool.extend(request, len(request.ids))
            except OutOfPagesError:
                if len(self._running) == 1:
                    raise
                if self._preempt() is request:
                    return False
            else:
                return True

    def _preempt(self) -> Request:
        request = self._running.pop()
        # No event: what reads these pages was launched before what will write them.
        self._pool.release(request)
        self._is_stuck = False
        request.num_computed = 0
        self._waiting.appendleft(request)
        return request
