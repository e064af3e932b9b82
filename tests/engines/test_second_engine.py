"""An engine of its own scheduler, cache and graphs on the interleaver alone, on a CPU."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from smkern.runtime.host_device import HostDevice
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.ticket import Ticket
from tests.engines import second_engine
from tests.engines.second_engine import Engine, Request
from tests.engines.second_model import Model, Sizes
from tests.engines.second_truth import greedy

pytestmark = pytest.mark.slow

LAYERS = 3


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(Sizes(layers=LAYERS), "cpu", torch.float32)


def simulated(model: Model, *, step_us: float, layer_us: float, **options: Any) -> Engine:
    """Work runs when it is launched, and is over when a step or a layer of such a time would be."""

    def about(lane: str, layers: int) -> dict[str, float]:
        return {"us": step_us if lane == "decode" else layers * layer_us}

    return Engine(model, SimDevice(132, (32, 64)), rung=64, about=about, **options)


def submit(engine: Engine, count: int, seed: int = 0) -> list[Request]:
    random = Random(seed)
    vocab = engine.model.sizes.vocab
    return [
        engine.submit(
            [random.randrange(vocab) for _ in range(random.randint(1, 40))], random.randint(1, 8)
        )
        for _ in range(count)
    ]


def check(engine: Engine, requests: list[Request]) -> None:
    """Tokens are those of each request computed alone and anew, and every slot is back."""
    for request in requests:
        prompt = request.ids[: request.prompt_len]
        assert request.tokens == greedy(engine.model, prompt, request.end - request.prompt_len)
    assert not engine.running
    assert not engine.waiting
    assert sorted(engine.free) == list(range(engine.caches[0].shape[1]))


@pytest.mark.parametrize("group", [1, 2, LAYERS])
@pytest.mark.parametrize(("step_us", "layer_us"), [(1, 1), (10, 37), (50, 3)])
def test_tokens_whatever_is_over_first(model, step_us, layer_us, group):
    engine = simulated(model, step_us=step_us, layer_us=layer_us, group=group)
    requests = submit(engine, 5)
    engine.run()
    check(engine, requests)


def test_tokens_on_a_device_that_is_the_host(model):
    engine = Engine(model, HostDevice(rungs=[32]), rung=32)
    requests = submit(engine, 5)
    engine.run()
    check(engine, requests)


def test_requests_that_come_while_others_run(model):
    engine, random = simulated(model, step_us=10, layer_us=30), Random(1)
    requests = submit(engine, 1)
    while engine.step() or len(requests) < 9:
        if len(requests) < 9 and random.random() < 0.2:
            requests += submit(engine, 1, seed=len(requests))
        engine.lanes.wait(until_us=engine.lanes.device.now_us() + 7)
    check(engine, requests)


def test_who_finds_no_slots_waits(model):
    engine = simulated(model, step_us=10, layer_us=30, slots=60)
    requests = submit(engine, 6)
    engine.run()
    check(engine, requests)


def test_layers_run_beside_decode_steps_and_never_on_their_sms(model):
    seen: list[Ticket] = []
    engine = simulated(model, step_us=10, layer_us=37, on_launch=seen.append)
    requests = submit(engine, 5)
    engine.run()
    check(engine, requests)
    assert {(x.lane, x.place.num_sms) for x in seen if x.place.side != "whole"} == {
        ("decode", 64),
        ("prefill", 68),
    }
    times = {x.number: x.event.times_us() for x in seen}
    for later in seen:
        for earlier in seen[: later.number]:
            if earlier.lane != later.lane and earlier.place.overlaps(later.place):
                assert times[earlier.number][1] <= times[later.number][0]
    # steps follow one another without a gap while a prompt's layers run beside them
    steps = [times[x.number] for x in seen if x.lane == "decode" and x.place.side != "whole"]
    assert sum(a[1] == b[0] for a, b in pairwise(steps)) > len(steps) / 2


def test_prompts_have_the_whole_device_while_nothing_decodes(model):
    seen: list[Ticket] = []
    engine = simulated(model, step_us=10, layer_us=30, on_launch=seen.append)
    request = engine.submit([1, 2, 3], 3)
    engine.run()
    check(engine, [request])
    assert {x.place.side for x in seen} == {"whole"}
    assert engine.lanes.device.now_us() == LAYERS * 30 + 2 * 10


def test_of_the_runtime_it_imports_the_interleaver_its_tickets_and_device_alone():
    source = Path(second_engine.__file__).read_text()
    nodes = [x for x in ast.walk(ast.parse(source)) if isinstance(x, (ast.Import, ast.ImportFrom))]
    names = {x.module if isinstance(x, ast.ImportFrom) else x.names[0].name for x in nodes}
    assert {x for x in names if x and x.startswith("smkern")} == {
        "smkern.partition",
        "smkern.runtime.device",
        "smkern.runtime.interleaver",
        "smkern.runtime.place",
        "smkern.runtime.ticket",
    }
