"""Replays on the simulated device: the same every time, and the same tokens under every policy."""

from __future__ import annotations

from random import Random

import pytest

from smkern.models import SamplingParams, preset
from smkern.policies import Chunked, Policy
from smkern.policies.static_split import StaticSplit
from smkern.runtime.handle import Handle, Output
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from smkern.runtime.sim.rates import ConstantRates

pytestmark = pytest.mark.slow

CONFIG = preset("qwen3-8b")


class Replay:
    """A minute of requests that come at random, more than the pages hold at a time.

    Prompts share prefixes, some requests end early, some are cancelled.
    """

    def __init__(self, policy: Policy, *, num_pages: int = 300, **options) -> None:
        device = SimDevice(
            132, (32, 64), ConstantRates(contention=1.2), decode_launch_us=30, prefill_launch_us=100
        )
        self.executor = SimExecutor(CONFIG, device, num_pages=num_pages, end_probability=0.005)
        mux = Multiplexer(self.executor, policy=policy, **options)
        draw, now_us = Random(5), 0.0
        shared = [draw.randrange(9999) for _ in range(1500)]
        self.handles: list[Handle] = []
        for _ in range(60):
            now_us += draw.expovariate(1 / 5e5)
            own = [draw.randrange(9999) for _ in range(draw.randrange(1, 1500))]
            params = SamplingParams(max_new_tokens=draw.randrange(1, 300))
            prompt = shared[: draw.randrange(1500)] + own
            self.handles.append(mux.submit(prompt, params, arrival_us=now_us))
        self.outputs: list[tuple[float, Output]] = []
        for output in mux.run():
            self.outputs.append((device.now_us(), output))
            if len(self.outputs) % 500 == 0:
                mux.cancel(self.handles[output.id])
        mux.close()

    def check(self) -> None:
        """Every request has the tokens of its formula, each once; all pages came back."""
        assert self.executor.hazards == []
        assert self.executor.device.overlap_us == 0
        self.executor.pool.check()
        assert self.executor.pool.poll() == 0
        assert self.executor.pool.usage.held == 0
        emitted: dict[int, list[int | None]] = {handle.id: [] for handle in self.handles}
        for _, output in self.outputs:
            emitted[output.id].append(output.token)
        for handle in self.handles:
            assert handle.done
            tokens = self.tokens(handle)
            if handle.completion is not None:
                assert emitted[handle.id] == list(handle.tokens) == tokens
            else:
                assert handle.cancelled
                assert list(handle.tokens) == tokens[: len(handle.tokens)]

    def tokens(self, handle: Handle) -> list[int]:
        return self.executor.completion(handle._request)


@pytest.mark.parametrize("preemption", ["recompute", "keep"])
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(lambda: Chunked(), id="aggregated"),
        pytest.param(lambda: StaticSplit(64), id="split"),
        pytest.param(lambda: StaticSplit(32, steps=4, layers=2, join="gang"), id="gang"),
    ],
)
def test_every_policy_delivers_the_tokens_of_the_formula(policy, preemption) -> None:
    Replay(policy(), preemption=preemption).check()


def test_a_replay_is_the_same_to_the_last_bit_of_the_clock() -> None:
    one, other = (Replay(StaticSplit(64), num_pages=200) for _ in range(2))
    assert one.outputs == other.outputs
