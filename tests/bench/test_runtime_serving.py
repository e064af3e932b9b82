"""The suite's workloads in miniature: tokens against each request alone, and a soak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smkern.bench.runtime import equality
from smkern.bench.runtime.equality import clear_mismatches, each_alone, pool_for, through, workload
from smkern.bench.runtime.random_policy import RandomPolicy
from smkern.bench.runtime.soak import Footprint, Segment, Soak, leaks_of, soak
from smkern.models import Decoder, Weights
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.sim.device import SimDevice
from tests.models.generation import tiny
from tests.runtime.world import RUNGS, Linear

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = tiny(max_position=128)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimDevice:
    """A device on whose clock the workloads wait."""
    made = SimDevice(132, RUNGS, Linear(), decode_launch_us=1.0, prefill_launch_us=1.5)
    monkeypatch.setattr(equality.time, "sleep", lambda seconds: made.spend(1e6 * seconds))
    return made


def multiplexer(decoder: Decoder, device: SimDevice, **options: Any) -> Multiplexer:
    executor = ModelExecutor(
        decoder, pool_for(CONFIG, decoder.device, 16 * 12), device=device, max_running=6,
        max_prefill=3, max_tokens=64, max_context=128,
    )  # fmt: skip
    return Multiplexer(executor, batch_invariant=decoder.batch_invariant, **options)


def test_a_workload_is_the_same_each_time() -> None:
    asked = workload(1, 50, 64, longest=40, answer=9)
    assert asked == workload(1, 50, 64, longest=40, answer=9)
    assert asked != workload(2, 50, 64, longest=40, answer=9)
    assert max(len(one.prompt) for one in asked) == 40
    assert all(1 <= one.params.max_new_tokens <= 9 for one in asked)
    assert any(one.cancel_after is not None for one in workload(1, 200, 64))


@pytest.mark.parametrize("preemption", ["recompute", "keep"])
def test_tokens_are_those_of_each_request_alone(device: SimDevice, preemption: Any) -> None:
    decoder = Decoder(CONFIG, Weights.random(CONFIG, 3), batch_invariant=True)
    asked = workload(4, 40, CONFIG.vocab_size, longest=60, answer=30)
    truth = each_alone(decoder, asked, max_context=128)
    mux = multiplexer(decoder, device, policy=RandomPolicy(2), preemption=preemption)
    verdict, tokens = through(mux, asked, truth)
    assert verdict.is_equal, verdict
    assert verdict.tokens == sum(map(len, tokens))
    assert mux.stats().preemptions


def test_a_wrong_token_is_found(device: SimDevice) -> None:
    decoder = Decoder(CONFIG, Weights.random(CONFIG, 3))
    asked = workload(4, 10, CONFIG.vocab_size, longest=30, answer=6, greedy=True)
    truth = each_alone(decoder, asked, max_context=128)
    index = next(i for i, one in enumerate(asked) if one.cancel_after is None and len(truth[i]) > 2)
    truth[index][2] += 1
    verdict, _ = through(multiplexer(decoder, device), asked, truth)
    assert (verdict.mismatches, verdict.wrong) == (1, [(index, 2)])


def test_what_rounding_does_not_decide(device: SimDevice) -> None:
    decoder = Decoder(CONFIG, Weights.random(CONFIG, 3))
    other = Decoder(CONFIG, Weights.random(CONFIG, 3), batch_invariant=True)
    asked = workload(4, 10, CONFIG.vocab_size, longest=30, answer=6, greedy=True)
    _, tokens = through(multiplexer(decoder, device), asked, [[] for _ in asked])
    differ, clear = clear_mismatches(decoder, other, asked, tokens, max_context=128)
    assert differ == 0
    assert 0.6 * sum(map(len, tokens)) < clear <= sum(map(len, tokens))
    wrong = [[(token + 1) % CONFIG.vocab_size for token in given] for given in tokens]
    assert clear_mismatches(decoder, other, asked, wrong, max_context=128)[0] > len(asked) // 2


def test_a_soak_in_segments(device: SimDevice, tmp_path: Path) -> None:
    """Counters and the requests to come are carried from one to the next."""
    path, decoder = tmp_path / "soak.json", Decoder(CONFIG, Weights.random(CONFIG, 3))
    for count in (1, 2):
        state = Soak.load(path, "tiny")
        mux = multiplexer(decoder, device, policy=RandomPolicy(count))
        said: list[str] = []
        soak(
            mux, state, 0.02, clock=lambda: device.now_us() / 1e6,
            rest=lambda seconds: device.spend(1e6 * seconds), say=said.append,
            longest=40, answer=30,
        )  # fmt: skip
        mux.close()
        assert len(state.segments) == count
        assert not state.leaks, state.leaks
        state.save(path)
    found = Soak.load(path, "tiny")
    assert found == state
    assert found.unjudged_minutes >= 2 * 0.02 / 60
    assert (found.minutes, found.next_seed) == (0, 2)
    with pytest.raises(ValueError, match="is a soak of tiny"):
        Soak.load(path, "another")


def at(second: float, host: int = 1000, graphs: int = 4, held: int = 3) -> Footprint:
    return Footprint(second, host, 0, graphs, held, 5)


def test_minutes_too_short_to_tell_a_leak_do_not_count() -> None:
    """Else twenty minutes of short segments would pass with any leak."""
    short = Segment(seconds=120.0, footprints=[at(5), at(95), at(120)])
    long = Segment(seconds=180.0, footprints=[at(5), at(95), at(175)])
    assert not Segment(seconds=60.0).is_judged
    assert (short.is_judged, long.is_judged) == (False, True)
    state = Soak("tiny", segments=[short, long, short])
    assert (state.minutes, state.unjudged_minutes) == (3.0, 4.0)


def test_leaks_are_named() -> None:
    def leaks(*footprints: Footprint, held: int = 0, **more: Any) -> list[str]:
        last = at(60.0, held=held)
        return leaks_of(Segment(footprints=list(footprints), left=last, **more))

    assert leaks(at(1, 10), at(95), at(150, 1009)) == []
    assert leaks(at(1, 10), at(30, 1000)) == [], "what fills up to its bound"
    assert leaks(at(95), at(150, 1011)) == ["host_bytes grew from 1000 to 1011 in 150 s"]
    assert leaks(at(95), at(150, graphs=5)) == ["graphs grew from 4 to 5 in 150 s"]
    assert leaks(held=2) == ["2 pages are held by nobody"]
    assert leaks(longest_quiet_s=7.0) == ["no token for 7.0 s"]
    assert leaks(failed=["x"]) == ["failed: x"]
