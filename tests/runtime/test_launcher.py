"""What a forward that never ran leaves behind: nothing that the next launch would rely on."""

from __future__ import annotations

import pytest

from smkern.errors import ModelError
from smkern.models import Decoder, SamplingParams, Weights
from smkern.models.step import Step
from smkern.runtime import ModelExecutor, Multiplexer
from smkern.runtime.in_flight import LaunchError
from tests.models.generation import one_at_a_time, random_prompts, tiny
from tests.runtime.alone import pool_of
from tests.runtime.doubles import ManualEvent

PAGE, ROWS = 16, 24


def fail(index: int, step: Step) -> None:
    raise ZeroDivisionError("planted")


def test_who_was_left_out_of_a_mixed_forward_that_raised_goes_on_from_its_own_token() -> None:
    """Its last token is on its way, and its row was given up for the forward: it must wait."""
    config = tiny()
    pool = pool_of(config, 8, PAGE, reuse=False)
    decoder = Decoder(config, Weights.random(config, 3))
    mux = Multiplexer(ModelExecutor(decoder, pool, max_running=4, max_prefill=2, max_tokens=64))
    params = SamplingParams(ROWS)
    prompts = random_prompts([PAGE - 3, 20], seed=5)
    alone = one_at_a_time(config, prompts[:1], [params])[0]
    first = mux.submit(prompts[0], params)
    while len(first.tokens) < 3:
        mux.step()
    launcher, queues = mux._launcher, mux._queues

    def take() -> None:
        mux._outputs.flush()
        mux._poll()
        mux._outputs.flush()

    take()
    mux.submit(prompts[1], params)
    (running,), (waiting,) = queues.running, queues.waiting
    assert queues.admit(waiting)
    pool.allocate("elsewhere", [1] * (PAGE * pool.usage.free))
    while len(running.ids) < running.room:
        launcher.decode(1)
        take()
    assert launcher.decode(1) == 1
    end = ManualEvent()
    pool.release("elsewhere", end)
    launcher.settle()
    assert running.num_pending == 1, "its token was not delivered"
    layer, decoder.layer = decoder.layer, fail  # type: ignore[method-assign, assignment]
    with pytest.raises(LaunchError):
        launcher.mixed([waiting], 64)
    decoder.layer = layer  # type: ignore[method-assign]
    mux._finisher.fail([waiting], ModelError("planted"))
    end.over = True
    assert launcher.decode(1) == 0
    for _ in mux.run():
        pass
    assert list(first.tokens) == list(alone)
