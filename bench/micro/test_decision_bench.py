"""What a decision costs the host by the length of the queue: `--benchmark-enable bench/micro`.

256 requests decode on the simulated device and others wait: a snapshot is made after a request that
waits has changed, a policy is asked, and its decision is checked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from smkern.models import SamplingParams, preset
from smkern.policies import Chunked, StaticSplit
from smkern.policies.check import check
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.sim.executor import SimExecutor

RUNNING, PROMPT, PAGE = 256, 40, 16
QUEUES = [1_000, 10_000, 100_000]
ORDERS = ["fcfs", "slack"]
POLICIES: dict[str, Any] = {
    "chunked": lambda: Chunked(512),
    "static_split": lambda: StaticSplit(48),
}


@cache
def long_queue(waiting: int, policy: str, order: str) -> Multiplexer:
    """256 requests decode, so many wait."""
    executor = SimExecutor(
        preset("qwen3-8b"), num_pages=40_000, page_size=PAGE, max_running=RUNNING + 32
    )
    chosen = POLICIES[policy]()
    chosen.order = order
    mux = Multiplexer(executor, policy=chosen)
    endless = SamplingParams(max_new_tokens=2000, ignore_eos=True)
    for index in range(RUNNING):
        mux.submit([index % 100] * PROMPT, endless)
    while len(mux._queues.running) < RUNNING:
        if not mux.step():
            mux.wait()
    while mux._launcher.steady is None:
        mux.wait()
        mux.step()
    once = SamplingParams(max_new_tokens=1)
    for index in range(waiting):
        deadline_ms = 1000.0 + 7919 * index % 5000
        mux.submit([index % 97, *[7] * (PROMPT - 1 - index % 16)], once, deadline_ms=deadline_ms)
    mux._scheduler.observer.look("decode", None)
    return mux


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("steady", [True, False], ids=["steady", "changed"])
@pytest.mark.parametrize("waiting", QUEUES)
def test_a_decision(benchmark, waiting, steady, policy, order):
    mux = long_queue(waiting, policy, order)
    scheduler, queues = mux._scheduler, mux._queues
    kept = mux._launcher._steady
    assert kept is not None

    def setup() -> None:
        mux._launcher._steady = kept if steady else None
        queues.look_again(queues.waiting[5])

    def decide() -> None:
        snapshot = scheduler.observer.look("decode", None)
        check(scheduler._policy.decide(snapshot), snapshot)

    benchmark.pedantic(decide, setup=setup, rounds=500, warmup_rounds=20)
    mux._launcher._steady = kept


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("waiting", QUEUES)
def test_a_request_changes_its_place(benchmark, waiting, order):
    """Taken out of the middle and put back: what a chunk, an end or a new request costs."""
    queues = long_queue(waiting, "chunked", order)._queues
    request = queues.waiting[waiting // 2]

    def move() -> None:
        queues.drop(request)
        queues.wait(request)

    benchmark.pedantic(move, rounds=300, warmup_rounds=10)
