"""What other ranks are told of requests: what an executor reads of them, and only what is new."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from smkern.kv import KvReplica, PagePool
from smkern.models.sampling import SamplingParams
from smkern.runtime.executor import PrefillChunk
from smkern.runtime.request import Request

Fixed = tuple[SamplingParams, int, frozenset[int], int, int]
"""Of a request that was not told before: params, seed, stop tokens, new tokens, prompt's tokens."""


class Records(NamedTuple):
    """What is new of some requests, in their order; lists of numbers, which are quick to send.

    Attributes:
        numbers: The requests'.
        pending: Tokens of each that were drawn and not delivered.
        had: Token ids of each that were told before.
        ids: Those that follow.
        pages: Of requests that have more: pages that were told before, and those that follow.
        fixed: Of requests that were not told before.
    """

    numbers: list[int]
    pending: list[int]
    had: list[int]
    ids: list[array[int]]
    pages: dict[int, tuple[int, tuple[int, ...]]]
    fixed: dict[int, Fixed]


ChunkRecord = tuple[int, int, int, bool]
"""A chunk: its request's number, and the rest of it."""


def chunk_records(chunks: Iterable[PrefillChunk]) -> list[ChunkRecord]:
    return [(chunk.request.index, *chunk[1:]) for chunk in chunks]


class Told:
    """Remembers what other ranks know of each request."""

    def __init__(self, pool: PagePool) -> None:
        self._pool: Any = pool
        self._known: dict[Request, tuple[int, int, int]] = {}
        """Token ids, tokens that the pages hold, pages."""

    def records(self, requests: Iterable[Request]) -> Records:
        """What is new of requests; they are told with it."""
        found = Records([], [], [], [], {}, {})
        known = self._known
        for request in requests:
            number, ids = request.index, request.ids
            had, room, first = known.get(request) or self._new(request, found)
            if request.room != room:
                pages = self._pool.pages(request, first)
                found.pages[number] = first, pages
                first += len(pages)
            known[request] = len(ids), request.room, first
            found.numbers.append(number)
            found.pending.append(request.num_pending)
            found.had.append(had)
            found.ids.append(ids[had:])
        return found

    def forget(self, request: Request) -> bool:
        """A request has left, or has other tokens and pages when it comes again; whether the others
        know it."""
        return self._known.pop(request, None) is not None

    def _new(self, request: Request, found: Records) -> tuple[int, int, int]:
        found.fixed[request.index] = (
            request.params, request.seed, request.stop_token_ids, request.max_new_tokens,
            request.prompt_len,
        )  # fmt: skip
        return 0, 0, 0


class Mirror:
    """Requests as another rank was told of them."""

    def __init__(self, pool: KvReplica) -> None:
        self._pool = pool
        self._requests: dict[int, Request] = {}

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def update(self, records: Records) -> list[Request]:
        """Take what is new of requests; they, in its order."""
        for number, (params, seed, stops, new, prompt_len) in records.fixed.items():
            ids = array("q")
            self._requests[number] = Request(number, params, seed, stops, new, ids, prompt_len)
        requests = [self._requests[number] for number in records.numbers]
        news = zip(requests, records.pending, records.had, records.ids, strict=True)
        for request, pending, had, ids in news:
            request.num_pending = pending
            request.ids[had:] = ids
        for number, (first, pages) in records.pages.items():
            self._pool.tell(self._requests[number], first, pages)
        return requests

    def chunks(self, records: Iterable[ChunkRecord]) -> list[PrefillChunk]:
        """Chunks of requests that are known."""
        return [PrefillChunk(self._requests[number], *rest) for number, *rest in records]  # type: ignore[arg-type]

    def forget(self, index: int) -> None:
        """A request has left, or is told anew when it comes again."""
        self._pool.forget(self._requests.pop(index))
