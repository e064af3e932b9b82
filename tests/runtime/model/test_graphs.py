"""Which decode graph serves a step: buckets, what stands in for a missing one, limits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from smkern.device import Budget
from smkern.errors import DeviceError
from smkern.models import Decoder, Weights
from smkern.models.step import batch_bucket
from smkern.runtime.model.graphs import MIB, GraphCache, GraphKey
from smkern.runtime.model.mixed_graph import MixedGraph
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.sizes import context_bucket
from smkern.runtime.place import Place
from tests.models.generation import tiny
from tests.runtime.alone import pool_of

WHOLE, RUNG = Place.whole(132), Place.of("decode", 32, 132)
MAX_CONTEXT = 8192


class FakeGraph:
    """A graph that tells where it was launched."""

    def __init__(self, cache: FakeCache, key: GraphKey, captured: bool) -> None:
        self.cache, self.key, self.captured = cache, key, captured

    def launch(self) -> None:
        self.cache.launched.append((self.key, self.captured))

    def close(self) -> None:
        self.cache.closed.append(self.key)


class FakeMixed(MixedGraph):
    """The layers of a mixed forward that are never launched."""

    def __init__(self, cache: FakeCache, key: GraphKey) -> None:
        self.cache, self.key = cache, key

    def close(self) -> None:
        self.cache.closed.append(self.key)


class FakeCache(GraphCache):
    """Captures nothing, a MiB each."""

    def __init__(self, limit_bytes: int = 100 * MIB) -> None:
        config = tiny(max_position=MAX_CONTEXT)
        decoder = Decoder(config, Weights.random(config, 3))
        pool = pool_of(config, 8)
        super().__init__(
            decoder,
            RowState.make(max_running=32, max_prefill=2, max_pages=4, device="cpu"),
            [pool.layer(i) for i in range(config.num_layers)],
            partition=lambda place: None,
            synchronize=lambda: None,
            max_context=MAX_CONTEXT,
            limit_bytes=limit_bytes,
        )
        self._mixed = SimpleNamespace(max_rows=200)  # type: ignore[assignment]
        self._captures = True
        self.launched: list[tuple[GraphKey, bool]] = []
        self.closed: list[GraphKey] = []
        self.made = 0
        self.full: Exception | None = None

    def _make(self, key: GraphKey, place: Place, *, capture: bool) -> FakeGraph:
        if capture and self.full is not None:
            raise self.full
        self.made += capture
        return FakeGraph(self, key, capture)

    def _made(self, key: GraphKey, place: Place) -> FakeGraph | FakeMixed:
        if not key.mixed:
            return self._make(key, place, capture=True)
        self.made += 1
        return FakeMixed(self, key)

    def _used_bytes(self) -> int:
        return self.made * MIB

    def mixed_rows(self, rows: int, longest: int) -> int | None:
        graph = self.mixed(rows, longest)
        assert graph is None or isinstance(graph, FakeMixed)
        return None if graph is None else graph.key.batch

    def run(self, place: Place, batch: int, longest: int) -> tuple[GraphKey, bool]:
        self.launch(place, batch, longest)
        return self.launched[-1]


def test_a_bucket_a_place():
    cache = FakeCache()
    assert cache.capture([WHOLE, RUNG], range(1, 33), [2048]) == 2 * 6
    assert cache.run(RUNG, 5, 100) == (GraphKey(32, 8, 2048), True)
    assert cache.run(WHOLE, 17, 2048) == (GraphKey(0, 32, 2048), True)
    assert not cache.missed
    assert cache.num_bytes == 12 * MIB
    assert cache.by_graph["32 SMs, 8 rows, 2048 keys"] == MIB
    cache.close()
    assert len(cache.closed) == 12
    assert len(cache) == 0


def test_ahead_the_shared_memory_is_made_once():
    cache = FakeCache()
    cache.capture([RUNG, WHOLE], [4, 32], [2048, MAX_CONTEXT])
    reserved = cache.shared_bytes
    assert reserved > 0
    assert next(iter(cache._graphs)) == GraphKey(0, 32, MAX_CONTEXT)
    cache.plans.plan(cache._plan_shape(GraphKey(32, 32, MAX_CONTEXT)), Budget(32))
    assert cache.shared_bytes == reserved
    # what is shared counts for no graph, so no limit makes it go
    assert cache.num_bytes == 8 * MIB


def test_what_is_missing_is_served_and_captured_later():
    cache = FakeCache()
    cache.capture([RUNG], [16], [MAX_CONTEXT])
    assert cache.run(RUNG, 3, 100) == (GraphKey(32, 16, MAX_CONTEXT), True)
    assert cache.run(RUNG, 20, 100) == (GraphKey(32, 32, 2048), False)
    assert cache.run(WHOLE, 3, 100) == (GraphKey(0, 4, 2048), False)
    assert set(cache.missed) == {
        GraphKey(32, 4, 2048),
        GraphKey(32, 32, 2048),
        GraphKey(0, 4, 2048),
    }
    assert cache.capture_missed() == 3
    assert cache.run(RUNG, 3, 100) == (GraphKey(32, 4, 2048), True)
    assert cache.run(WHOLE, 3, 100) == (GraphKey(0, 4, 2048), True)
    assert cache.capture_missed() == 0


def test_mixed_forwards_have_a_graph_by_rows():
    """Padding costs time, so a graph of many more rows serves none of few."""
    cache = FakeCache()
    cache.capture([WHOLE], [16], [2048])
    assert cache.capture_mixed([64, 192], [2048]) == 2
    assert cache.mixed_rows(33, 100) == cache.mixed_rows(64, 2048) == 64
    assert cache.mixed_rows(161, 100) == 192
    assert not cache.missed
    assert cache.mixed_rows(97, 100) is None
    assert cache.mixed_rows(64, 2049) is None
    assert cache.mixed_rows(193, 100) is None, "more than the buffers hold"
    missed = {GraphKey(0, 128, 2048, mixed=True), GraphKey(0, 64, MAX_CONTEXT, mixed=True)}
    assert set(cache.missed) == missed
    assert cache.capture_missed() == 2
    assert cache.mixed_rows(97, 100) == 128
    assert cache.mixed_rows(192, 100) == 192
    assert cache.ready(32, 100) == (), "they are no decode steps"
    assert cache.run(WHOLE, 20, 100) == (GraphKey(0, 32, 2048), False)
    cache.close()
    assert len(cache.closed) == 5


def test_the_longest_unused_go():
    cache = FakeCache(limit_bytes=3 * MIB)
    cache.capture([RUNG], [4], [2048])
    cache.capture([RUNG], [2, 1], [2048])
    cache.run(RUNG, 4, 1)
    cache.capture([WHOLE], [4], [2048])
    assert cache.closed == [GraphKey(32, 2, 2048)]
    assert cache.run(RUNG, 2, 1) == (GraphKey(32, 4, 2048), True)
    assert cache.num_bytes == 3 * MIB


def test_ahead_the_largest_of_every_place_stay():
    """A smaller step is served by a larger graph, a larger step by none."""
    cache = FakeCache(limit_bytes=5 * MIB)
    assert cache.capture([RUNG, WHOLE], range(1, 33), [2048]) == len(cache) == 5
    rows = [(key.rung, key.batch) for key in cache._graphs]
    assert rows == [(0, 32), (32, 32), (0, 16), (32, 16), (0, 8)]
    assert cache.run(RUNG, 3, 100) == (GraphKey(32, 16, 2048), True)
    assert cache.ready(32, 100) == (None, 32)
    assert cache.capture_mixed([16, 64, 192], [2048]) == 3
    assert cache.capture_missed() == 1
    assert cache.num_bytes == 5 * MIB


def test_decode_steps_go_before_mixed_forwards():
    cache = FakeCache(limit_bytes=4 * MIB)
    assert cache.capture_mixed(range(1, 200), [2048]) == 4
    assert cache.capture([WHOLE], [8, 16, 32], [2048]) == 3
    assert [key.mixed for key in cache._graphs] == [True, False, False, False]


def test_one_graph_over_the_limit_stays_alone():
    cache = FakeCache(limit_bytes=1)
    assert cache.capture([WHOLE, RUNG], [8, 16], [2048]) == len(cache) == 1
    assert cache.closed == [GraphKey(32, 16, 2048)]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("no memory"),
        RuntimeError("CUDA error: out of memory"),  # of a graph's nodes
        DeviceError("cuModuleLoadData failed with 2: out of memory"),
    ],
)
def test_no_memory_at_capture_is_reported_and_served_otherwise(error: Exception):
    cache = FakeCache()
    cache.capture([RUNG], [16], [2048])
    cache.full = error
    assert cache.capture([RUNG], [8, 32], [2048]) == 0
    assert cache.refused == {GraphKey(32, n, 2048): str(error) for n in (8, 32)}
    assert cache.run(RUNG, 8, 1) == (GraphKey(32, 16, 2048), True)
    assert cache.run(RUNG, 32, 1) == (GraphKey(32, 32, 2048), False)
    cache.full = None
    assert cache.capture_missed() == 0
    cache.close()
    assert cache.capture([RUNG], [8], [2048]) == 1


def test_another_error_at_capture_is_raised():
    cache = FakeCache()
    cache.full = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted"):
        cache.capture([RUNG], [8], [2048])
    assert not cache.refused


def test_a_cpu_has_none():
    cache = FakeCache()
    cache._captures = False
    assert cache.capture([WHOLE, RUNG], [4], [2048]) == 0
    assert cache.key(RUNG, 5, 100) == cache.key(WHOLE, 5, 100) == GraphKey(0, 5, MAX_CONTEXT)
    assert cache.ready(4, 100) is None, "all rungs are"


@pytest.mark.parametrize(
    ("batch", "rows"), [(1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 32), (40, 48), (99, 100)]
)
def test_buckets_of_batches(batch: int, rows: int) -> None:
    assert batch_bucket(batch, 100) == rows


def test_buckets_of_contexts() -> None:
    lengths = [1, 2048, 2049, 8192, 8193, 30_000]
    wanted = [2048, 2048, 8192, 8192, 30_000, 30_000]
    assert [context_bucket(x, 30_000) for x in lengths] == wanted


def test_rungs_that_are_ready_have_a_graph_for_the_step() -> None:
    cache = FakeCache()
    assert cache.ready(4, 100) == ()
    cache.capture([WHOLE], [8], [MAX_CONTEXT])
    cache.capture([RUNG], [8], [2048])
    assert cache.ready(4, 100) == (None, 32)
    assert cache.ready(8, 2048) == (None, 32)
    assert cache.ready(8, 2049) == cache.ready(8, 8192) == (None,)
    assert cache.ready(8, 2048) == (None, 32)
    assert cache.ready(9, 100) == ()
    cache.capture([RUNG], [16], [MAX_CONTEXT])
    assert cache.ready(9, 100) == (32,)
    assert cache.ready(8, 3000) == (None, 32)
    cache.close()
    assert cache.ready(8, 3000) == ()
