"""What other ranks are told of requests: what an executor reads of them, and only what is new."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from smkern.kv import KvReplica, PagePool
from smkern.models.sampling import SamplingParams
from smkern.runtime.executor import PrefillChunk
from smkern.runtime.request import Request


class Fixed(NamedTuple):
    """Of a request that was not told before."""

    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    prompt_len: int


class Record(NamedTuple):
    """What is new of a request.

    Attributes:
        number: The request's.
        num_pending: Tokens that were drawn and not delivered.
        had: Token ids that were told before; `ids` follow.
        ids: Token ids.
        first: Pages that were told before; `pages` follow.
        pages: Page ids.
        fixed: Of one that was not told before.
    """

    number: int
    num_pending: int
    had: int
    ids: list[int]
    first: int
    pages: tuple[int, ...]
    fixed: Fixed | None


ChunkRecord = tuple[int, int, int, bool]
"""A chunk: its request's number, and the rest of it."""


def chunk_records(chunks: Iterable[PrefillChunk]) -> list[ChunkRecord]:
    return [(chunk.request.index, *chunk[1:]) for chunk in chunks]


class Told:
    """Remembers what other ranks know of each request.

    Args:
        pool: The requests' pages.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool: Any = pool
        self._known: dict[Request, tuple[int, int, int]] = {}
        """Token ids, tokens that the pages hold, pages."""

    def knows(self, request: Request) -> bool:
        return request in self._known

    def records(self, requests: Iterable[Request]) -> list[Record]:
        """What is new of requests; they are told with it."""
        return [self._record(request) for request in requests]

    def forget(self, request: Request) -> None:
        """A request has left, or has other tokens and pages when it comes again."""
        self._known.pop(request, None)

    def _record(self, request: Request) -> Record:
        known, fixed = self._known.get(request), None
        if known is None:
            known = 0, 0, 0
            fixed = Fixed(
                request.params, request.seed, request.stop_token_ids, request.max_new_tokens,
                request.prompt_len,
            )  # fmt: skip
        had, room, first = known
        pages: tuple[int, ...] = ()
        if request.room != room:
            pages = self._pool.pages(request, first)
        self._known[request] = len(request.ids), request.room, first + len(pages)
        ids = request.ids[had:]
        return Record(request.index, request.num_pending, had, ids, first, pages, fixed)


class Mirror:
    """Requests as another rank was told of them.

    Args:
        pool: Holds their pages.
    """

    def __init__(self, pool: KvReplica) -> None:
        self._pool = pool
        self._requests: dict[int, Request] = {}

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def update(self, records: Iterable[Record]) -> list[Request]:
        """Take what is new of requests; they, in its order."""
        return [self._updated(record) for record in records]

    def chunks(self, records: Iterable[ChunkRecord]) -> list[PrefillChunk]:
        """Chunks of requests that are known."""
        return [PrefillChunk(self._requests[number], *rest) for number, *rest in records]  # type: ignore[arg-type]

    def pop(self, index: int) -> Request:
        """A request that is told anew when it comes again."""
        request = self._requests.pop(index)
        self._pool.forget(request)
        return request

    def _updated(self, record: Record) -> Request:
        if record.fixed is not None:
            fixed = record.fixed
            self._requests[record.number] = Request(
                record.number, fixed.params, fixed.seed, fixed.stop_token_ids, fixed.max_new_tokens,
                [], fixed.prompt_len,
            )  # fmt: skip
        request = self._requests[record.number]
        request.ids[record.had :] = record.ids
        request.num_pending = record.num_pending
        if record.pages:
            self._pool.tell(request, record.first, record.pages)
        return request
