"""Other ranks: they carry out what rank 0 tells, and decide nothing."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from smkern.errors import ArgumentError, RankError
from smkern.kv import KvReplica
from smkern.runtime.device import Event, Work
from smkern.runtime.executor import Draw, PrefillRun
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.place import Lane, Place
from smkern.runtime.ranks.channel import Link, described
from smkern.runtime.ranks.records import ChunkRecord, Mirror, Records

_NOTHING = Work("fence", lambda place: None, launches=0)


def follow(executor: ModelExecutor, link: Link) -> None:
    """Carry out rank 0's calls and launches until it closes its executor.

    Args:
        executor: This rank's, of the same sizes as rank 0's; its pool is a `KvReplica`.
        link: To rank 0.

    Raises:
        RankError: a rank is gone, hangs or failed; it is named.
        ArgumentError: a pool of another kind.

    Example:
        >>> follow(ModelExecutor(decoder, replica), open_links(tp))  # doctest: +SKIP
    """
    if not isinstance(executor.pool, KvReplica):
        raise ArgumentError(
            f"pool={executor.pool!r} of a rank that follows: make it a KvReplica, rank 0 gives out "
            "the pages"
        )
    replay = _Replay(executor, executor.pool, link.timeout_s)
    while True:
        number, kind, overs, payload = link.receive()
        error: str | None = None
        try:
            for launch in overs:
                replay.over(launch)
            if kind != "close":
                getattr(replay, kind)(number, *payload)
        except Exception as reason:  # noqa: BLE001  rank 0 says whether that ends the run
            error = described(reason)
        link.answer(number, error)
        if kind == "close":
            executor.close()
            return


class _Replay:
    """Rank 0's calls on this rank's executor; each takes the message's number first."""

    def __init__(self, executor: ModelExecutor, pool: KvReplica, timeout_s: float) -> None:
        self._executor = executor
        self._device = executor.device
        self._requests = Mirror(pool)
        self._timeout_s = timeout_s
        self._runs: dict[int, PrefillRun] = {}
        self._prepared: tuple[int, list[tuple[Work, Draw | None]]] = 0, []
        self._launched: dict[int, tuple[Event, Draw | None]] = {}

    def begin(
        self, number: int, records: Records, chunks: Sequence[ChunkRecord], slot: int
    ) -> None:
        self._requests.update(records)
        self._runs[slot] = self._executor.begin(self._requests.chunks(chunks), slot)

    def prefill(self, number: int, slot: int, first: int, count: int) -> None:
        run = self._runs[slot]
        work = self._executor.prefill(run, first, count)
        is_last = first + count == self._executor.config.num_layers
        self._prepared = number, [(work, run.draw if is_last else None)]

    def decode(self, number: int, records: Records, steps: int) -> None:
        requests = self._requests.update(records)
        self._prepared = number, [*self._executor.decode(requests, steps)]

    def prepare_next(self, number: int, records: Records, steps: int) -> None:
        self._executor.prepare_next(self._requests.update(records), steps)

    def mixed(
        self, number: int, records: Records, chunks: Sequence[ChunkRecord],
        decoding: Sequence[int],
    ) -> None:  # fmt: skip
        self._requests.update(records)
        requests = [self._requests[index] for index in decoding]
        work = self._executor.mixed(self._requests.chunks(chunks), requests)
        self._prepared = number, [work]

    def forget(self, number: int, index: int) -> None:
        request = self._requests[index]
        self._executor.forget(request)
        self._requests.forget(index)

    def idle(self, number: int) -> None:
        self._executor.idle()

    def same_graphs(self, number: int, wanted: list[str]) -> None:
        found = sorted(self._executor.graphs.by_graph)
        if found != wanted:
            odd = sorted({*found} ^ {*wanted})
            refused = self._executor.graphs.refused
            raise RankError(
                f"graphs {odd[:4]} are on one of rank 0 and this one alone ({len(refused)} found "
                "no memory here): give each GPU the same free memory"
            )

    def launch(
        self, number: int, lane: Lane, place: Place, prepared: tuple[int, int] | None
    ) -> None:
        work, draw = _NOTHING, None
        if prepared is not None:
            call, index = prepared
            assert call == self._prepared[0], (call, self._prepared[0])
            work, draw = self._prepared[1][index]
        self._launched[number] = self._device.launch(lane, place, work), draw

    def over(self, number: int) -> None:
        """A launch is over on rank 0: wait until it is here, and give its tokens' room back."""
        found: Any = self._launched.pop(number, None)
        if found is None:
            return
        event, draw = found
        end = monotonic() + self._timeout_s
        while not event.query():
            if monotonic() > end:
                raise RankError(
                    f"a launch has not ended here for {self._timeout_s:g} s, and is over on rank 0"
                )
            self._device.wait([event], None)
        if draw is not None:
            draw.read()
