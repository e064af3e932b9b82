"""The executor on a GPU: graphs on partitions, layers beside them, mixed forwards; to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import pytest
import torch

import smkern
from smkern.models import Decoder, SamplingParams
from smkern.runtime.device import Work
from smkern.runtime.executor import Draw, PrefillChunk, PrefillRun
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.place import Lane, Place
from smkern.runtime.request import Request
from smkern.runtime.ticket import Ticket
from tests.gpu.models.support import small_weights
from tests.runtime.alone import pool_of

LENGTHS = [300, 17, 9, 129, 64, 511, 40, 33]
NEW = 24
RUNGS = (16, 40)
ALLOCATED = "allocation.all.allocated"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    weights = small_weights(max_position=2048)
    return Decoder(weights.config, weights, batch_invariant=True)


@pytest.fixture(scope="module")
def prompts(decoder: Decoder) -> list[list[int]]:
    random = Random(2)
    vocab = decoder.config.vocab_size
    return [[random.randrange(vocab) for _ in range(n)] for n in LENGTHS]


class Run:
    """Requests on an executor, each with the pages that it will need."""

    def __init__(self, executor: ModelExecutor, prompts: Sequence[Sequence[int]]) -> None:
        self.executor = executor
        self.lanes = Interleaver(executor.device)
        self.requests = []
        for i, prompt in enumerate(prompts):
            params = SamplingParams(NEW, temperature=0.8 * (i % 2), top_p=0.9)
            request = Request(i, params, i, frozenset(), NEW, list(prompt), len(prompt))
            executor.pool.allocate(request, request.ids, num_tokens=request.max_tokens_held)
            self.requests.append(request)
        self.drawn: dict[Request, list[int]] = {request: [] for request in self.requests}
        self.draws: dict[Ticket, Draw] = {}

    def chunk(self, request: Request, start: int = 0, count: int | None = None) -> PrefillChunk:
        count = request.prompt_len - start if count is None else count
        return PrefillChunk(request, start, count, start + count == request.prompt_len)

    def poll(self) -> None:
        """Tokens of what is over; the host knows them from now on."""
        for ticket in self.lanes.poll():
            draw = self.draws.pop(ticket, None)
            if draw is not None:
                for request, token in zip(draw.requests, draw.read(), strict=True):
                    request.num_pending -= 1
                    if len(self.drawn[request]) < NEW:
                        self.drawn[request].append(token)
                        request.ids.append(token)

    def drain(self) -> None:
        while any(self.lanes.queued(lane) for lane in ("decode", "prefill")):
            self.lanes.wait()
            self.poll()

    def launch(self, lane: Lane, work: Work, draw: Draw | None = None) -> None:
        while not self.lanes.can_launch(lane, work):
            self.lanes.wait()
            self.poll()
        ticket = self.lanes.launch(lane, work)
        if draw is not None:
            self.draws[ticket] = draw
            for request in draw.requests:
                request.num_pending += 1

    def layers(self, batch: PrefillRun, first: int, count: int) -> None:
        work = self.executor.prefill(batch, first, count)
        self.launch("prefill", work, batch.draw)

    def prefill(self, chunks: Sequence[PrefillChunk], slot: int = 0) -> None:
        batch = self.executor.begin(chunks, slot)
        self.layers(batch, 0, self.executor.config.num_layers)
        self.drain()

    def decode(self, requests: Sequence[Request], steps: int) -> None:
        for work, draw in self.executor.decode(requests, steps):
            self.launch("decode", work, draw)

    def finish(self) -> list[list[int]]:
        """The tokens of all requests, whose pages are given back."""
        self.drain()
        for request in self.requests:
            self.executor.forget(request)
            self.executor.pool.release(request)
        return [self.drawn[request] for request in self.requests]

    @property
    def unfinished(self) -> list[Request]:
        return [x for x in self.requests if len(self.drawn[x]) < NEW]


@contextmanager
def executor(decoder: Decoder, rungs: Sequence[int] = RUNGS) -> Iterator[ModelExecutor]:
    pool = pool_of(decoder.config, 256, device="cuda", reuse=False)
    with smkern.ladder(rungs) as ladder:
        made = ModelExecutor(
            decoder, pool, ladder=ladder, max_running=16, max_prefill=4, max_tokens=1024
        )
        yield made
        made.synchronize()
        made.close()
        del made


@pytest.fixture(scope="module")
def alone(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt alone on the whole device, a launch at a time."""
    tokens = []
    with executor(decoder) as made:
        run = Run(made, prompts)
        for request in run.requests:
            run.prefill([run.chunk(request)])
            for _ in range(NEW - 1):
                run.decode([request], 1)
                run.drain()
        tokens = run.finish()
    assert len({tuple(x) for x in tokens}) == len(tokens)
    return tokens


@pytest.mark.parametrize("captured", [True, False])
def test_decode_beside_layers_on_moving_splits(decoder, prompts, alone, captured: bool):
    with executor(decoder) as made:
        if captured:
            made.capture()
            made.warm()
        run, random = Run(made, prompts), Random(3)
        run.prefill([run.chunk(x) for x in run.requests[:2]])
        for at in (2, 4, 6):
            batch = made.begin([run.chunk(x) for x in run.requests[at : at + 2]], at // 2 % 2)
            for layer in range(made.config.num_layers):
                run.lanes.aim(random.choice([None, *RUNGS]))
                run.poll()
                ready = [x for x in run.unfinished if run.drawn[x]]
                if not run.lanes.queued("decode"):
                    run.decode(ready, 2)
                run.layers(batch, layer, 1)
            run.drain()
        while run.unfinished:
            run.lanes.aim(random.choice([None, *RUNGS]))
            run.decode(run.unfinished, random.randint(1, 8))
            run.drain()
        assert run.finish() == alone
        assert bool(made.graphs.missed) is not captured
        assert (made.memory_report().graphs > 0) is captured


@pytest.mark.parametrize("captured", [True, False])
def test_steps_that_are_prepared(decoder, prompts, alone, captured: bool):
    """Their pages are sent behind steps that run; some of them are asked for, others are not."""
    with executor(decoder) as made:
        if captured:
            made.capture()
            made.warm()
        run, random = Run(made, prompts), Random(5)
        for at in (0, 2, 4, 6):
            run.prefill([run.chunk(x) for x in run.requests[at : at + 2]])
        steps = 1
        while run.unfinished:
            run.lanes.aim(random.choice([None, *RUNGS]))
            some = tuple(run.unfinished)
            run.decode(some, steps)
            prepared = random.randint(1, 4)
            made.prepare_next(some, prepared)
            steps = random.choice([prepared, 1])
            run.drain()
        assert run.finish() == alone


@pytest.mark.parametrize("chunk_tokens", [20, 100, 1000])
def test_mixed_steps_ahead_of_the_host(decoder, prompts, alone, chunk_tokens: int):
    with executor(decoder) as made:
        made.capture([None], contexts=[2048])
        run = Run(made, prompts)
        left = dict.fromkeys(run.requests, NEW)
        done = dict.fromkeys(run.requests, 0)
        waiting, running = list(run.requests), []
        while waiting or running:
            chunks, room = [], chunk_tokens
            for request in waiting[:4]:
                count = _cut(request.prompt_len - done[request], room)
                if not count:
                    break
                chunks.append(run.chunk(request, done[request], count))
                done[request] += count
                room -= count
            mixed = [made.mixed(chunks, running)] if chunks else []
            for work, draw in mixed or made.decode(running, 2):
                run.launch("decode", work, draw)
                for request in draw.requests:
                    left[request] -= 1
            for chunk in chunks:
                if chunk.draws:
                    waiting.remove(chunk.request)
                    running.append(chunk.request)
            running = [x for x in running if left[x] > 0]
            while run.lanes.queued("decode") > 3:
                run.lanes.wait()
                run.poll()
        assert run.finish() == alone


def _cut(left: int, room: int) -> int:
    """A chunk after which more than 8 tokens are left, or none."""
    if left <= room:
        return left
    count = min(room, left - 9)
    return count if count > 8 else 0


def test_a_batch_that_preempts_and_moves(decoder, prompts, alone):
    """The plan of a batch is made anew when it moves to other SMs."""
    with executor(decoder) as made:
        made.capture(batches=[2, 4, 8])
        run = Run(made, prompts)
        outer = made.begin([run.chunk(x) for x in run.requests[:4]], 0)
        for layer, rung in enumerate((16, None)):
            run.drain()
            run.lanes.aim(rung)
            run.layers(outer, layer, 1)
            run.drain()
            run.lanes.aim(40)
            run.prefill([run.chunk(x) for x in run.requests[4 + 2 * layer :][:2]], slot=1)
            run.decode([x for x in run.unfinished if run.drawn[x]], 3)
        run.drain()
        if made.config.num_layers > 2:
            run.layers(outer, 2, made.config.num_layers - 2)
        run.drain()
        while run.unfinished:
            run.decode(run.unfinished, 4)
            run.drain()
        assert run.finish() == alone


def test_serving_allocates_and_loads_nothing(decoder, prompts):
    with executor(decoder) as made:
        made.capture()
        made.warm()

        def serve() -> None:
            run = Run(made, prompts)
            run.lanes.aim(40)
            run.prefill([run.chunk(x) for x in run.requests[:2]])
            batch = made.begin([run.chunk(x) for x in run.requests[2:4]], 0)
            for layer in range(made.config.num_layers):
                run.decode(run.requests[:2], 2)
                run.layers(batch, layer, 1)
                run.drain()
            run.finish()

        serve()
        before = torch.cuda.memory_stats()[ALLOCATED], smkern.counters()
        serve()
        assert (torch.cuda.memory_stats()[ALLOCATED], smkern.counters()) == before


def test_graphs_over_their_limit_go(decoder, prompts, alone):
    with executor(decoder, [16]) as made:
        every = made.capture(contexts=[2048])
        report = made.memory_report()
        assert every == report.graphs == len(report.by_graph)
        assert report.graph_bytes == sum(report.by_graph.values())
        made.graphs._limit_bytes = report.graph_bytes // 2
        made.capture([16], batches=[1], contexts=[1024])
        made.graphs._evict()
        assert made.memory_report().graph_bytes <= report.graph_bytes // 2
        run = Run(made, prompts)
        run.prefill([run.chunk(x) for x in run.requests[:4]])
        run.prefill([run.chunk(x) for x in run.requests[4:]])
        while run.unfinished:
            run.decode(run.unfinished, 5)
            run.drain()
        assert run.finish() == alone
        made.idle()
        assert not made.graphs.missed


def test_graphs_share_all_but_their_nodes(decoder, prompts, alone):
    with executor(decoder) as made:
        made.capture([RUNGS[-1]], batches=[16])
        shared = made.memory_report().shared_bytes
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        assert made.capture() > 4
        report = made.memory_report()
        assert report.graphs > 5
        # the whole device may have more partial sums than the rung that came first
        assert report.shared_bytes - shared <= 64 << 20
        torch.cuda.empty_cache()
        grown = torch.cuda.memory_reserved() - reserved
        assert grown <= report.shared_bytes - shared + (40 << 20)
        graphs = {held.graph for held in made.graphs._graphs.values()}
        assert {graph._scratch for graph in graphs} == {made.graphs.scratch}
        streams = {
            made.device.partition(Place.of("decode", rung, made.device.num_sms)).raw_stream
            for rung in RUNGS
        }
        segments = [x for x in torch.cuda.memory_snapshot() if x["allocated_size"]]
        # a graph of torch's keeps some words of its own, and nothing else is made on these streams
        assert sum(x["allocated_size"] for x in segments if x["stream"] in streams) < 1 << 16
        run = Run(made, prompts)
        run.prefill([run.chunk(x) for x in run.requests[:4]])
        run.prefill([run.chunk(x) for x in run.requests[4:]])
        at = 0
        while run.unfinished:
            # graphs of other places and buckets one behind another, each from the same memory
            run.lanes.aim((16, None, 40)[at % 3])
            for most in (16, 3):
                run.decode(run.unfinished[:most], 1 + at % 3)
                run.drain()
            at += 1
        assert run.finish() == alone
        assert not made.graphs.missed


def test_times_are_on_the_hosts_clock(decoder, prompts):
    with executor(decoder) as made:
        run = Run(made, prompts)
        run.prefill([run.chunk(run.requests[0])])
        run.decode(run.requests[:1], 4)
        tickets = list(run.draws)
        run.drain()
        made.synchronize()
        spans = [ticket.event.times_us() for ticket in tickets]
        for ticket, (begun, ended) in zip(tickets, spans, strict=True):
            assert ticket.launched_us <= begun + 1 <= ended + 2 <= ticket.seen_us + 3
        run.finish()


def test_an_error_of_the_lane_leaves_it_in_order(decoder):
    with executor(decoder) as made:
        lanes = Interleaver(made.device)
        x = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()

        def fails(_: object) -> None:
            x.add_(1)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            lanes.launch("prefill", Work("fails", fails))
        lanes.aim(16)
        lanes.launch("prefill", Work("doubles", lambda _: x.mul_(2)))
        lanes.drain()
        made.synchronize()
        assert x.item() == 2


def test_what_a_launch_that_raised_has_put_there_keeps_the_other_lane_away(decoder):
    with executor(decoder) as made:
        lanes = Interleaver(made.device)

        def fails(_: object) -> None:
            torch.cuda._sleep(100_000_000)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            lanes.launch("prefill", Work("fails", fails))
        assert not lanes.can_launch("decode")
        assert lanes.drain() == []
        assert lanes.can_launch("decode")
