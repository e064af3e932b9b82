"""Where requests sit in a decode batch, and what the graphs read of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from smkern.kv import KvPool, Staging
from smkern.models.graph import DecodeInputs
from smkern.models.request import Request

FIRST_CONTEXT = 2048
"""The shortest context that a graph is made for; each next one is four times as long."""


def batch_bucket(batch: int, max_batch: int) -> int:
    """The rows of the graph that serves a batch: 1, 2, 4, 8, 16, then every 16.

    At most a third of the rows of a batch above 32 is padding, which reads no keys.
    """
    rounded = 1 << (batch - 1).bit_length() if batch <= 16 else -(-batch // 16) * 16
    return min(rounded, max_batch)


def context_bucket(length: int, max_context: int) -> int:
    """The context of the graph for lengths up to this: attention's buffers grow by it."""
    bucket = FIRST_CONTEXT
    while bucket < length:
        bucket *= 4
    return min(bucket, max_context)


class DecodeRows:
    """The rows of decode graphs: requests without gaps, and their inputs on the device.

    A replay leaves in the rows what the next one needs, so only a change of requests is sent, and
    the pages that they got. Rows without a request are finished.

    Args:
        pool: Of the requests' pages.
        max_batch: Rows.
        max_context: Tokens of a request.
    """

    def __init__(self, pool: KvPool, max_batch: int, max_context: int) -> None:
        self._pool = pool
        self._tables = pool.page_tables(max_batch, max_context)
        self._staging = Staging(pool.device)
        self._max_batch = max_batch
        self._inputs = DecodeInputs.make(
            max_batch, self._tables.tensor, max_kv_len=max_context + 1, max_stop_tokens=1
        )
        self._requests: list[Request] = []
        # Pages of each row that are in the table.
        self._written = [0] * max_batch

    @property
    def requests(self) -> Sequence[Request]:
        """The request of each row."""
        return self._requests

    def inputs(self, rows: int) -> DecodeInputs:
        """What a graph of so many rows reads: views of the same memory for every graph."""
        views = {x.name: getattr(self._inputs, x.name)[:rows] for x in fields(DecodeInputs)}
        return DecodeInputs(**views)

    def tokens(self) -> list[int]:
        """The tokens that the last replay drew, by row; waits for it."""
        drawn: list[int] = self._inputs.token_ids[: len(self._requests)].tolist()
        return drawn

    def clear(self) -> None:
        """Forget what the rows hold, so that the next `arrange` sends all."""
        self._requests = []
        self._written = [0] * self._max_batch

    def arrange(self, requests: Sequence[Request]) -> None:
        """Seat these requests, and send what changed: sampling and lengths, new pages.

        A request keeps its row; the last ones move into gaps.
        """
        rows = self._seat(requests)
        if rows != self._requests:
            self._requests = rows
            self._send()
        for row, request in enumerate(rows):
            missing = self._pool.pages_for(len(request.ids)) - self._written[row]
            if missing > 0:
                pages = self._pool.pages(request, self._written[row])
                self._tables.write(row, self._written[row], pages)
                self._written[row] += len(pages)
        self._tables.flush()

    def _seat(self, requests: Sequence[Request]) -> list[Request]:
        coming = dict.fromkeys(requests)
        rows: list[Request | None] = [x if x in coming else None for x in self._requests]
        new = [x for x in coming if x not in set(self._requests)]
        gaps = [row for row, request in enumerate(rows) if request is None]
        for row in gaps:
            if new:
                rows[row] = new.pop(0)
                self._written[row] = 0
        for request in new:
            self._written[len(rows)] = 0
            rows.append(request)
        for row in gaps:
            while rows and rows[-1] is None:
                rows.pop()
            if row < len(rows) and rows[row] is None:
                rows[row] = rows.pop()
                self._written[row] = 0
        return [x for x in rows if x is not None]

    def _send(self) -> None:
        """All numbers of all rows: a few hundred bytes, in one go."""
        x, rows, empty = self._inputs, self._requests, self._max_batch - len(self._requests)
        n, params = len(rows), [request.params for request in rows]
        sent: list[tuple[Tensor, Sequence[int] | Sequence[float]]] = [
            (x.token_ids[:n], [request.ids[-1] for request in rows]),
            (x.kv_lens[:n], [len(request.ids) for request in rows]),
            (x.finished, [False] * n + [True] * empty),
            (x.temperature[:n], [p.temperature for p in params]),
            (x.top_k[:n], [p.top_k for p in params]),
            (x.top_p[:n], [p.top_p for p in params]),
            (x.min_p[:n], [p.min_p for p in params]),
            (x.seeds[:n], [request.seed for request in rows]),
        ]
        self._staging.send(sent)
