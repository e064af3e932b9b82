"""A second engine on a GPU: graphs of its own beside layers, FlashInfer's layout of the cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from random import Random

import pytest
import torch

import smkern
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.ticket import Ticket
from tests.engines.second_engine import Engine, Request
from tests.engines.second_model import Model, Sizes
from tests.engines.second_truth import logits

SIZES = Sizes(layers=4, hidden=1024, heads=8, kv_heads=2, head_dim=128, width=2048, vocab=4000)
RUNG = 40
ROOM = {"max_prompt": 512, "slots": 4096}


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SIZES, "cuda", torch.bfloat16)


@pytest.fixture(autouse=True)
def _pinned_memory_is_freed() -> Iterator[None]:
    """Torch notes a stream in the pinned memory that it copies to there: see `Partition.close`."""
    yield
    gc.collect()


def texts(count: int) -> list[tuple[list[int], int]]:
    """Prompts, and how many tokens are wanted behind each."""
    random = Random(4)
    return [
        (
            [random.randrange(SIZES.vocab) for _ in range(random.choice([9, 60, 300, 500]))],
            random.randint(2, 40),
        )
        for _ in range(count)
    ]


def run(engine: Engine, given: list[tuple[list[int], int]]) -> list[Request]:
    requests = [engine.submit(*text) for text in given]
    engine.run()
    assert sorted(engine.free) == list(range(ROOM["slots"]))
    return requests


def serve(
    model: Model,
    ladder: smkern.Ladder,
    given: list[tuple[list[int], int]],
    on_launch: Callable[[Ticket], None] | None = None,
) -> list[Request]:
    """All of them together, decode steps as graphs on the rung beside layers on its complement."""
    device = CudaDevice(ladder)
    engine = Engine(
        model, device, rung=RUNG, ladder=ladder, max_batch=8, on_launch=on_launch, **ROOM
    )
    requests = run(engine, given)
    device.synchronize()
    for graph in engine.graphs.values():
        graph.close() if hasattr(graph, "close") else graph.reset()
    return requests


def test_tokens_are_those_of_each_request_alone(model, ladder):
    """Bit for bit: one at a time on the whole device, without graphs, partitions or neighbours."""
    given = texts(16)
    together = serve(model, ladder, given)
    engine = Engine(model, CudaDevice(), rung=RUNG, max_batch=1, **ROOM)
    for text, request in zip(given, together, strict=True):
        (alone,) = run(engine, [text])
        assert len(alone.tokens) == text[1]
        assert request.tokens == alone.tokens


def test_tokens_are_best_up_to_rounding(model, ladder):
    for request in serve(model, ladder, texts(6)):
        scores = logits(model, request.ids[:-1])[request.prompt_len - 1 :]
        chosen = scores.gather(1, torch.tensor(request.tokens)[:, None])[:, 0]
        assert bool((scores.max(1).values - chosen <= 0.05 * scores.abs().max()).all())


def test_layers_run_beside_decode_steps_and_never_on_their_sms(model, ladder):
    seen: list[Ticket] = []
    serve(model, ladder, texts(12), seen.append)
    total = smkern.device_info().num_sms
    assert {(x.lane, x.place.num_sms) for x in seen if x.place.side != "whole"} == {
        ("decode", RUNG),
        ("prefill", total - RUNG),
    }
    for later in seen:
        for earlier in seen[: later.number]:
            if earlier.lane != later.lane and earlier.place.overlaps(later.place):
                assert earlier.seen_us is not None
                assert earlier.seen_us <= later.launched_us
    steps, layers = (
        [x.event.times_us() for x in seen if x.lane == lane and x.place.side != "whole"]
        for lane in ("decode", "prefill")
    )
    assert any(a[0] < b[1] and b[0] < a[1] for a in steps for b in layers)
