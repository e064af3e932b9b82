"""A model's launches on CPU tensors: the tokens of every way through the executor."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from smkern.errors import ArgumentError, DeviceError
from smkern.latency.work import padded_rows
from smkern.models import Decoder, SamplingParams, Weights
from smkern.runtime.device import Work
from smkern.runtime.executor import Draw, PrefillChunk
from smkern.runtime.host_device import HostDevice, HostEvent
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.model.mixed_graph import MixedGraph
from smkern.runtime.model.prefill import activation_bytes
from smkern.runtime.place import Lane
from smkern.runtime.request import Request
from tests.models.generation import VOCAB, one_at_a_time, random_prompts, tiny
from tests.runtime.alone import pool_of

pytestmark = pytest.mark.slow

LENGTHS = [5, 1, 40, 17, 16, 33]
NEW = 9
PARAMS = [
    SamplingParams(NEW) if i % 2 else SamplingParams(NEW, temperature=1.0, top_p=0.9, seed=i)
    for i in range(len(LENGTHS))
]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=7)


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[list[int]]:
    return [list(tokens) for tokens in one_at_a_time(tiny(), prompts, PARAMS)]


class Run:
    """Requests on an executor, each with the pages that it will need."""

    def __init__(self, prompts: Sequence[Sequence[int]], **options: Any) -> None:
        config = tiny()
        pool = pool_of(config, 64, reuse=False)
        decoder = Decoder(config, Weights.random(config, 3))
        given = {"max_running": 8, "max_prefill": 4, "max_tokens": 64}
        self.executor = ModelExecutor(decoder, pool, **given | options)
        self.lanes = Interleaver(self.executor.device)
        self.requests = [
            Request(i, params, params.seed or 0, frozenset(), NEW, list(prompt), len(prompt))
            for i, (prompt, params) in enumerate(zip(prompts, PARAMS, strict=False))
        ]
        for request in self.requests:
            pool.allocate(request, request.ids, num_tokens=request.max_tokens_held)
        self.drawn: dict[Request, list[int]] = {request: [] for request in self.requests}

    def chunk(self, request: Request, start: int = 0, count: int | None = None) -> PrefillChunk:
        count = request.prompt_len - start if count is None else count
        return PrefillChunk(request, start, count, start + count == request.prompt_len)

    def launch(self, lane: Lane, work: Work, draw: Draw | None = None) -> None:
        self.lanes.poll()
        self.lanes.launch(lane, work)
        for request in () if draw is None else draw.requests:
            request.num_pending += 1

    def take(self, draw: Draw | None) -> None:
        """What a launch drew: the host hears of it now."""
        if draw is None:
            return
        for request, token in zip(draw.requests, draw.read(), strict=True):
            request.num_pending -= 1
            if len(self.drawn[request]) < NEW:
                self.drawn[request].append(token)
                request.ids.append(token)

    def prefill(self, chunks: Sequence[PrefillChunk], group: int = 1, slot: int = 0) -> None:
        run = self.executor.begin(chunks, slot)
        for first in range(0, self.executor.config.num_layers, group):
            self.launch("prefill", self.executor.prefill(run, first, group), run.draw)
        self.take(run.draw)

    def decode(self, requests: Sequence[Request], steps: int) -> None:
        draws = []
        for work, draw in self.executor.decode(requests, steps):
            self.launch("decode", work, draw)
            draws.append(draw)
        for draw in draws:
            self.take(draw)

    def tokens(self) -> list[list[int]]:
        return [self.drawn[request] for request in self.requests]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_layers_then_steps(group, steps, prompts, alone):
    run = Run(prompts)
    run.prefill([run.chunk(x) for x in run.requests[:2]], group)
    run.decode(run.requests[:2], 2)
    run.prefill([run.chunk(x) for x in run.requests[2:4]], group)
    run.prefill([run.chunk(x) for x in run.requests[4:]], group)
    while any(len(tokens) < NEW for tokens in run.tokens()):
        run.decode([x for x in run.requests if len(run.drawn[x]) < NEW], steps)
    assert run.tokens() == alone


def test_chunks_and_a_batch_that_preempts(prompts: list[list[int]], alone: list[list[int]]):
    run = Run(prompts)
    long, short = run.requests[2], run.requests[0]
    run.prefill([run.chunk(long, 0, 13)])
    outer = run.executor.begin([run.chunk(long, 13), run.chunk(run.requests[3])], 0)
    run.launch("prefill", run.executor.prefill(outer, 0, 1))
    run.prefill([run.chunk(short), run.chunk(run.requests[1])], slot=1)
    run.decode([short, run.requests[1]], 2)
    run.launch("prefill", run.executor.prefill(outer, 1, 1), outer.draw)
    run.take(outer.draw)
    some = run.requests[:4]
    while any(len(run.drawn[x]) < NEW for x in some):
        run.decode([x for x in reversed(some) if len(run.drawn[x]) < NEW], 3)
    assert run.tokens()[:4] == alone[:4]


def give_mixed_graphs(run: Run) -> None:
    """Layers of mixed forwards are launched in one piece."""
    executor = run.executor

    def mixed(rows: int, longest: int) -> MixedGraph:
        graphs, most = executor.graphs, executor._inputs.max_rows
        return MixedGraph(
            executor._model, executor._inputs, min(padded_rows(rows), most), executor.max_context,
            plan_memory=graphs.plans, scratch=graphs.scratch, capture=False,
        )  # fmt: skip

    executor.graphs.mixed = mixed  # type: ignore[method-assign]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("chunk_tokens", [5, 16, 64])
def test_mixed_steps_ahead_of_the_host(chunk_tokens, ahead, graphs, prompts, alone):
    """Whole generations, of which the host hears `ahead` launches late."""
    run = Run(prompts)
    if graphs:
        give_mixed_graphs(run)
    pool = run.executor.pool
    free = sorted({*range(pool.num_pages)}.difference(*map(pool.pages, run.requests)))
    pool.storage[:, :, free] = 7
    waiting = list(run.requests)
    done: dict[Request, int] = dict.fromkeys(waiting, 0)
    left: dict[Request, int] = dict.fromkeys(waiting, NEW)
    late: list[Draw] = []
    running: list[Request] = []
    while waiting or running:
        chunks, room = [], chunk_tokens
        for request in list(waiting):
            count = min(request.prompt_len - done[request], room)
            if count == 0 or len(chunks) == 4:
                break
            chunks.append(run.chunk(request, done[request], count))
            done[request] += count
            room -= count
        mixed = [run.executor.mixed(chunks, running)] if chunks else []
        works = mixed or run.executor.decode(running, 2)
        for work, draw in works:
            run.launch("decode", work, draw)
            late.append(draw)
            for request in draw.requests:
                left[request] -= 1
        for chunk in chunks:
            if chunk.draws:
                waiting.remove(chunk.request)
                running.append(chunk.request)
        running = [x for x in running if left[x] > 0]
        while len(late) > ahead:
            run.take(late.pop(0))
    for draw in late:
        run.take(draw)
    assert run.tokens() == alone
    assert (pool.storage[:, :, free] == 7).all(), "padding was written to a page"


def test_a_mixed_forward_without_memory_for_its_tokens_leaves_the_rows(prompts, alone, monkeypatch):
    run = Run(prompts)
    first, second = run.requests[:2]
    run.prefill([run.chunk(first)])
    work, _ = run.executor.mixed([run.chunk(second)], [first])

    def none() -> None:
        raise MemoryError("no pinned memory")

    with monkeypatch.context() as patched:
        patched.setattr(run.executor._reads, "_free", [])
        patched.setattr(run.executor._reads, "_grow", none)
        with pytest.raises(MemoryError):
            run.launch("decode", work)
    run.executor.forget(second)
    while len(run.drawn[first]) < NEW:
        run.decode([first], 1)
    assert run.drawn[first] == alone[0]


def test_a_long_mixed_forward_tells_how_far_it_is(prompts: list[list[int]]):
    """Each layer that is launched is told to the forward's own mark."""
    layers: list[int] = []
    run = Run(prompts)
    short, _ = run.executor.mixed([run.chunk(run.requests[0])], [])
    assert short.left is None
    mark: Any = SimpleNamespace(layer_done=layers.append, left=lambda: 7)
    run.executor._mixed._marks = iter([mark])
    work, _ = run.executor.mixed([run.chunk(run.requests[0])], [])
    assert not layers
    run.launch("decode", work)
    assert layers == list(range(run.executor.config.num_layers))
    assert work.left is not None
    assert work.left(HostEvent(0.0, 1.0)) == 7


def test_random_orders(prompts: list[list[int]], alone: list[list[int]]):
    """Requests that pause, leave and come back, each way to run them, in any order."""
    for seed in range(8):
        random = Random(seed)
        run = Run(prompts)
        done = dict.fromkeys(run.requests, 0)
        while any(len(tokens) < NEW for tokens in run.tokens()):
            ready = [x for x in run.requests if run.drawn[x] and len(run.drawn[x]) < NEW]
            some = random.sample(ready, random.randint(0, len(ready)))
            fresh = [x for x in run.requests if not run.drawn[x]]
            chunks = []
            for request in random.sample(fresh, min(len(fresh), random.randint(0, 3))):
                count = random.randint(1, min(20, request.prompt_len - done[request]))
                chunks.append(run.chunk(request, done[request], count))
                done[request] += count
            if chunks and random.random() < 0.5:
                work, draw = run.executor.mixed(chunks, some)
                run.launch("decode", work, draw)
                run.take(draw)
                continue
            if chunks:
                run.prefill(chunks, slot=random.randint(0, 1))
            run.decode(some, random.randint(1, 4))
            if some and random.random() < 0.3:
                run.executor.forget(random.choice(some))
        assert run.tokens() == alone


def test_rows_that_end_on_the_device(prompts: list[list[int]], alone: list[list[int]]):
    run = Run(prompts[:2])
    first, second = run.requests
    first.stop_token_ids = frozenset({alone[0][3]})
    run.prefill([run.chunk(first), run.chunk(second)])
    run.decode([first, second], NEW - 1)
    until = alone[0].index(alone[0][3]) + 1
    assert run.drawn[first][:until] == alone[0][:until]
    assert set(run.drawn[first][until:]) == {0}
    assert run.drawn[second] == alone[1]


def test_what_cannot_be(prompts: list[list[int]]):
    run = Run(prompts, max_prefill=2, max_tokens=30)
    chunks = [run.chunk(x) for x in run.requests]
    with pytest.raises(ArgumentError, match="3 chunks of 46 tokens: the buffers hold 1 to 2 of 30"):
        run.executor.begin(chunks[:3], 0)
    batch = run.executor.begin(chunks[:2], 0)
    with pytest.raises(ArgumentError, match="layers 1 to 3 of 2"):
        run.executor.prefill(batch, 1, 2)
    with pytest.raises(ArgumentError, match="prefill slot 0 holds a batch"):
        run.executor.begin(chunks[3:4], 0)
    with pytest.raises(ArgumentError, match="a mixed forward needs its buffers"):
        run.executor.mixed(chunks[3:4], [])
    for chunk in chunks[:2]:
        run.executor.forget(chunk.request)
    run.executor.begin(chunks[3:4], 0)
    with pytest.raises(ArgumentError, match="the batch of prefill slot 0 is gone"):
        run.executor.prefill(batch, 0, 1)
    assert run.executor.decode([], 3) == []


def test_no_context_beyond_the_models_positions():
    config = tiny()
    pool = pool_of(config, 4)
    decoder = Decoder(config, Weights.random(config, 3), max_position=32)
    assert ModelExecutor(decoder, pool, max_running=2, max_prefill=1).max_context == 32
    with pytest.raises(ArgumentError, match="max_context=33"):
        ModelExecutor(decoder, pool, max_running=2, max_prefill=1, max_context=33)


def test_closing_waits_for_what_was_launched(prompts: list[list[int]]):
    """A launch that raised midway is in no lane's queue, and still runs."""

    class Waited(HostDevice):
        waits = 0
        error: Exception | None = None

        def synchronize(self) -> None:
            self.waits += 1
            if self.error is not None:
                raise self.error

    device = Waited()
    run = Run(prompts, device=device)
    before = device.waits
    run.executor.close()
    assert device.waits == before + 1
    device.error = DeviceError("lost")
    run.executor.close()


def test_memory_report(prompts: list[list[int]]):
    run = Run(prompts)
    report = run.executor.memory_report()
    assert report.graphs == 0
    assert report.kv_bytes == run.executor.pool.storage.nbytes
    assert min(report.activation_bytes, report.state_bytes) > VOCAB
    run.executor.close()
    run.executor.close()


def test_activation_bytes_are_known_beforehand() -> None:
    config = tiny()
    sizes = {"max_running": 3, "max_prefill": 2, "max_tokens": 16}
    decoder = Decoder(config, Weights.random(config))
    executor = ModelExecutor(decoder, pool_of(config, 4, reuse=False), **sizes)
    assert executor.memory_report().activation_bytes == activation_bytes(config, **sizes)
