"""What the loop of a `Multiplexer` costs the host, by parts: `--benchmark-enable bench/micro`.

128 requests decode on 40 SMs beside prompts that wait, on a device whose launches cost nothing.
What CUDA's own calls take comes on top (`smkern bench runtime --only host`).
"""

from __future__ import annotations

import pytest

from smkern.bench.micro.fake_gpu import RUNNING, WAITING, BusyRuntime
from smkern.policies.check import check

ROUNDS = 300


@pytest.fixture(scope="module")
def busy() -> BusyRuntime:
    return BusyRuntime()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("waiting", [0, WAITING, 400])
def test_from_the_end_of_a_step_to_the_next_launch(benchmark, waiting, steps):
    """`control_us` is in extra_info: the timed step also hands out the tokens behind the launch."""
    busy = BusyRuntime(waiting, steps)
    busy.mux._scheduler.control_us.clear()
    benchmark.pedantic(busy.mux.step, setup=busy.end_a_step, rounds=ROUNDS, warmup_rounds=10)
    control_us = sorted(busy.mux.control_us)
    assert control_us
    benchmark.extra_info["control_p50_us"] = round(control_us[len(control_us) // 2], 1)
    benchmark.extra_info["control_p99_us"] = round(control_us[99 * len(control_us) // 100], 1)


def test_poll_and_read(benchmark, busy):
    def setup() -> None:
        busy.mux.step()
        busy.end_a_step()

    benchmark.pedantic(busy.mux._poll, setup=setup, rounds=ROUNDS, warmup_rounds=10)


def test_snapshot(benchmark, busy):
    found = benchmark(busy.mux._scheduler.observer.look, "decode", None)
    assert found.batch == RUNNING


def test_decide_and_check(benchmark, busy):
    snapshot = busy.mux._scheduler.observer.look("decode", None)
    policy = busy.mux._scheduler._policy
    assert benchmark(lambda: check(policy.decide(snapshot), snapshot)).steps == 1


def test_launch_decode(benchmark, busy):
    def setup() -> None:
        busy.mux.step()
        busy.end_a_step()
        busy.mux._poll()

    benchmark.pedantic(
        busy.mux._launcher.decode, args=(1,), setup=setup, rounds=ROUNDS, warmup_rounds=10
    )


def test_hand_out_behind_the_launch(benchmark, busy):
    def setup() -> None:
        busy.mux.step()
        busy.end_a_step()
        busy.mux._poll()
        busy.mux._launcher.decode(1)

    benchmark.pedantic(busy.mux._outputs.flush, setup=setup, rounds=ROUNDS, warmup_rounds=10)


def test_put_records_in_order(benchmark, busy):
    """A step's records of the timeline, put in order between two polls."""

    def setup() -> None:
        busy.end_a_step()
        busy.mux.timeline.settle()
        busy.mux.step()

    benchmark.pedantic(busy.mux.timeline.settle, setup=setup, rounds=ROUNDS, warmup_rounds=10)
