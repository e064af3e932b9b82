"""The simulated executor: tokens by a formula, and what a GPU would not have survived."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from smkern.errors import ArgumentError
from smkern.models import SamplingParams, preset
from smkern.runtime.executor import Draw, PrefillChunk
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.model.sizes import MAX_MIXED_ROWS
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.request import Request
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from smkern.runtime.sim.pool import HazardError
from smkern.runtime.sim.rates import ConstantRates
from smkern.runtime.sim.rows import AFTER_END
from smkern.runtime.ticket import Ticket

CONFIG = preset("qwen3-8b").replace(num_layers=4, eos_token_ids=(0, 1))
PAGE = 16


class Bench:
    """An executor with its lanes, driven by hand."""

    def __init__(self, **options: float) -> None:
        settings = {"num_pages": 64, "page_size": PAGE, "max_context": 200} | options
        self.device = SimDevice(132, (32, 64), ConstantRates())
        self.executor = SimExecutor(CONFIG, self.device, **settings)
        self.pool = self.executor.pool
        self.lanes = Interleaver(self.device)

    def request(self, prompt: Sequence[int], new: int = 8, seed: int = 0) -> Request:
        params = SamplingParams(max_new_tokens=new, seed=seed)
        ends = frozenset(CONFIG.eos_token_ids)
        request = Request(seed, params, seed, ends, new, list(prompt), len(prompt))
        self.pool.allocate(request, prompt, num_tokens=request.max_tokens_held)
        return request

    def prefill(self, *requests: Request, slot: int = 0) -> Draw:
        """All layers in two launches; not waited for."""
        chunks = [PrefillChunk(request, 0, len(request.ids), True) for request in requests]
        run = self.executor.begin(chunks, slot)
        for first in (0, 2):
            self.lanes.launch("prefill", self.executor.prefill(run, first, 2))
        assert run.draw is not None
        return run.draw

    def decode(self, *requests: Request, steps: int = 1) -> list[Draw]:
        works = self.executor.decode(requests, steps)
        for work, _ in works:
            self.lanes.launch("decode", work)
        return [draw for _, draw in works]

    def over(self) -> list[Ticket]:
        return self.lanes.drain()


def accept(*draws: Draw) -> None:
    for draw in draws:
        for request, token in zip(draw.requests, draw.read(), strict=True):
            if request.finish_reason is None:
                request.accept(token)


def test_every_schedule_draws_the_same_tokens() -> None:
    bench = Bench()
    one, other = bench.request(range(40), seed=1), bench.request(range(7), seed=2)
    draw = bench.prefill(one, other)
    bench.over()
    accept(draw)
    draws = bench.decode(one, other, steps=7)
    bench.over()
    accept(*draws)
    for request in (one, other):
        assert request.finish_reason == "length"
        assert request.ids[request.prompt_len :] == bench.executor.completion(request)
    assert bench.executor.hazards == []


def test_chunks_of_mixed_steps_draw_the_same_tokens_before_the_host_read_any() -> None:
    bench = Bench()
    one, other = bench.request(range(40), seed=1), bench.request(range(50), seed=2)
    draws = []
    for chunks, rows in [
        ([PrefillChunk(one, 0, 40, True), PrefillChunk(other, 0, 20, False)], []),
        ([PrefillChunk(other, 20, 30, True)], [one]),
        ([], [one, other]),
    ]:
        if chunks:
            work, draw = bench.executor.mixed(chunks, rows)
            bench.lanes.launch("decode", work)
            draws.append(draw)
        else:
            draws += bench.decode(*rows, steps=6)
    bench.over()
    accept(*draws)
    assert one.ids[40:] == bench.executor.completion(one)
    assert other.ids[50:] == bench.executor.completion(other)[:7]


def test_mixed_forwards_are_graphs_up_to_the_rows_that_a_gpu_has_them_for() -> None:
    bench = Bench(num_pages=200, max_context=3000, max_tokens=3000)
    request = bench.request(range(2900))
    small, large = (
        bench.executor.mixed([PrefillChunk(request, 0, new, False)], [])[0]
        for new in (MAX_MIXED_ROWS, MAX_MIXED_ROWS + 1)
    )
    assert (small.launches, small.left) == (1, None)
    assert large.launches > CONFIG.num_layers
    assert large.left is not None


def test_a_request_that_ended_on_the_device_draws_no_token() -> None:
    bench = Bench(end_probability=1.0)
    request = bench.request(range(20))
    first = bench.prefill(request)
    bench.over()
    draws = bench.decode(request, steps=2)
    bench.over()
    assert first.read()[0] in CONFIG.eos_token_ids
    assert [draw.read() for draw in draws] == [[AFTER_END], [AFTER_END]]


def test_work_that_is_dropped_changes_nothing() -> None:
    bench = Bench()
    request = bench.request(range(20))
    accepted = bench.prefill(request)
    bench.over()
    accept(accepted)
    bench.executor.decode([request], 4)
    draws = bench.decode(request, steps=7)
    bench.over()
    accept(*draws)
    assert request.ids[20:] == bench.executor.completion(request)


def test_a_request_with_its_pages_kept_goes_on_with_the_tokens_of_the_host() -> None:
    bench = Bench()
    request = bench.request(range(20), new=3)
    accepted = bench.prefill(request)
    bench.over()
    accept(accepted)
    bench.executor.forget(request)
    draws = bench.decode(request, steps=2)
    bench.over()
    accept(*draws)
    assert request.ids[20:] == bench.executor.completion(request)


def decode_before_prefill(bench: Bench) -> None:
    request = bench.request(range(20))
    bench.lanes.aim(64)
    bench.prefill(request)
    bench.decode(request)


def decode_in_the_middle_of_a_prompt(bench: Bench) -> None:
    request = bench.request(range(20))
    work, _ = bench.executor.mixed([PrefillChunk(request, 0, 10, False)], [])
    bench.lanes.launch("decode", work)
    bench.decode(request)


def pages_missing(bench: Bench) -> None:
    request = bench.request(range(16), new=1)
    request.max_new_tokens = 4
    bench.prefill(request)
    bench.over()
    bench.decode(request)


def context_too_long(bench: Bench) -> None:
    request = bench.request(range(201))
    bench.prefill(request)


def pages_back_too_early(bench: Bench) -> None:
    request = bench.request(range(16))
    bench.prefill(request)
    bench.pool.release(request)


def pages_back_with_an_event_of_another_launch(bench: Bench) -> None:
    bench.lanes.aim(64)
    one, other = bench.request(range(3)), bench.request(range(30))
    bench.prefill(one)
    bench.over()
    bench.prefill(other)
    bench.decode(one)
    step = bench.lanes.tickets("decode")[-1]
    bench.pool.release(other, step)
    while not step.query():
        bench.lanes.wait()
        bench.lanes.poll()
    bench.pool.poll()


def graph_of_the_other_lane(bench: Bench) -> None:
    request = bench.request(range(16))
    bench.prefill(request)
    bench.over()
    ((work, _),) = bench.executor.decode([request], 1)
    bench.lanes.launch("prefill", work)


def mixed_on_a_side(bench: Bench) -> None:
    bench.lanes.aim(32)
    work, _ = bench.executor.mixed([PrefillChunk(bench.request(range(16)), 0, 16, True)], [])
    bench.lanes.launch("decode", work)


def slot_used_twice(bench: Bench) -> None:
    one, other = bench.request(range(16)), bench.request(range(17))
    bench.executor.begin([PrefillChunk(one, 0, 16, True)], 0)
    bench.executor.begin([PrefillChunk(other, 0, 17, True)], 0)


def layers_left_out(bench: Bench) -> None:
    run = bench.executor.begin([PrefillChunk(bench.request(range(16)), 0, 16, True)], 0)
    bench.lanes.launch("prefill", bench.executor.prefill(run, 2, 2))


def tokens_read_too_early(bench: Bench) -> None:
    bench.prefill(bench.request(range(16))).read()


def request_twice_in_a_step(bench: Bench) -> None:
    request = bench.request(range(16))
    bench.executor.decode([request, request], 1)


def shared_page_written(bench: Bench) -> None:
    prompt = list(range(32))
    one = bench.request(prompt)
    bench.prefill(one)
    bench.over()
    bench.pool.commit(one, prompt)
    other = bench.request(prompt)
    run = bench.executor.begin([PrefillChunk(other, 0, 32, True)], 0)
    bench.lanes.launch("prefill", bench.executor.prefill(run, 0, 4))


def token_overwritten_before_it_was_read(bench: Bench) -> None:
    one, other = bench.request(range(16)), bench.request(range(17))
    bench.prefill(one)
    bench.over()
    bench.prefill(other)
    bench.over()
    bench.decode(one)


@pytest.mark.parametrize(
    "mistake",
    [
        decode_before_prefill,
        decode_in_the_middle_of_a_prompt,
        pages_missing,
        context_too_long,
        pages_back_too_early,
        pages_back_with_an_event_of_another_launch,
        graph_of_the_other_lane,
        mixed_on_a_side,
        slot_used_twice,
        layers_left_out,
        tokens_read_too_early,
        request_twice_in_a_step,
        shared_page_written,
        token_overwritten_before_it_was_read,
    ],
)
def test_what_a_gpu_would_not_have_told_raises_and_is_kept(mistake) -> None:
    bench = Bench()
    with pytest.raises(HazardError):
        mistake(bench)
    assert len(bench.executor.hazards) == 1


def test_what_it_is_made_of_is_checked() -> None:
    config = preset("qwen3-8b")
    with pytest.raises(ArgumentError, match="config='qwen3-8b': pass a ModelConfig"):
        SimExecutor("qwen3-8b", num_pages=8)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="device=132: pass a SimDevice"):
        SimExecutor(config, 132, num_pages=8)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="executor='sim': pass a ModelExecutor"):
        Multiplexer("sim")  # type: ignore[arg-type]
