"""An engine of its own scheduler, cache and graphs on the interleaver alone, on a CPU."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch

from smkern.runtime.interleaver import Ticket
from tests.engines import second_engine
from tests.engines.lagging import Lagging
from tests.engines.second_engine import Engine, Request
from tests.engines.second_model import Model, Sizes
from tests.engines.second_truth import greedy


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(Sizes(), "cpu", torch.float32)


def submit(engine: Engine, count: int, seed: int = 0) -> list[Request]:
    random = Random(seed)
    vocab = engine.model.sizes.vocab
    return [
        engine.submit([random.randrange(vocab) for _ in range(random.randint(1, 40))],
                      random.randint(1, 12))
        for _ in range(count)
    ]  # fmt: skip


def check(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        prompt = request.ids[: request.prompt_len]
        assert request.tokens == greedy(engine.model, prompt, request.end - request.prompt_len)
    assert not engine.running
    assert not engine.waiting
    assert len(set(engine.free)) == len(engine.free) == engine.caches[0].shape[1]


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize(("decode", "prefill"), [(1, 1), (1, 4), (5, 1)])
def test_tokens_are_those_of_one_request_at_a_time(model, decode, prefill, group):
    engine = Engine(model, Lagging(decode=decode, prefill=prefill), rung=32, group=group)
    requests = submit(engine, 7)
    engine.run()
    check(engine, requests)


def test_requests_that_come_while_others_run(model):
    engine = Engine(model, Lagging(), rung=64)
    requests, random = submit(engine, 1), Random(1)
    while engine.step() or len(requests) < 9:
        if len(requests) < 9 and random.random() < 0.2:
            requests += submit(engine, 1, seed=len(requests))
        engine.lanes.wait()
    check(engine, requests)


def test_who_finds_no_slots_waits(model):
    engine = Engine(model, Lagging(), rung=16, slots=60)
    requests = submit(engine, 6)
    engine.run()
    check(engine, requests)


def test_layers_run_beside_decode_steps_and_never_on_their_sms(model):
    seen: list[Ticket] = []
    engine = Engine(model, Lagging(prefill=3), rung=32, on_launch=seen.append)
    requests = submit(engine, 5)
    engine.run()
    check(engine, requests)
    beside = [x for x in seen if x.place.side != "whole"]
    assert {(x.lane, x.place.rung, x.place.num_sms) for x in beside} == {
        ("decode", 32, 32),
        ("prefill", 32, 100),
    }
    # what held SMs when a launch began: launched before it, and seen over after it
    for later in seen:
        for earlier in seen[: later.number]:
            if earlier.lane != later.lane and earlier.place.overlaps(later.place):
                assert earlier.seen_us is not None
                assert earlier.seen_us <= later.launched_us
    steps = [x.number for x in seen if x.lane == "decode"]
    layers = [x.number for x in seen if x.lane == "prefill"]
    assert any(a < step < b for step in steps for a, b in pairwise(layers))


def test_prompts_have_the_whole_device_while_nothing_decodes(model):
    seen: list[Ticket] = []
    engine = Engine(model, Lagging(), rung=32, on_launch=seen.append)
    engine.submit([1, 2, 3], 3)
    engine.run()
    assert {x.place.side for x in seen} == {"whole"}


def test_of_the_runtime_it_imports_the_interleaver_and_its_device_alone():
    source = Path(second_engine.__file__).read_text()
    nodes = [x for x in ast.walk(ast.parse(source)) if isinstance(x, (ast.Import, ast.ImportFrom))]
    names = {x.module if isinstance(x, ast.ImportFrom) else x.names[0].name for x in nodes}
    assert {x for x in names if x and x.startswith("smkern.runtime")} == {
        "smkern.runtime.device",
        "smkern.runtime.interleaver",
        "smkern.runtime.place",
    }
    assert {x for x in names if x and x.startswith("smkern")} <= {
        "smkern.partition", "smkern.runtime.device", "smkern.runtime.interleaver",
        "smkern.runtime.place",
    }  # fmt: skip
