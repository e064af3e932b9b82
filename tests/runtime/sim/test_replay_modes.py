"""A replay without checks, tokens or a timeline has the times of the step-by-step run, exactly."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest

import smkern.policies
from smkern.errors import ArgumentError, RequestError
from smkern.kv import VirtualTokens
from smkern.models import SamplingParams
from smkern.policies import Chunked, Policy
from smkern.policies.static_split import StaticSplit
from smkern.runtime import Multiplexer, SimDevice, SimExecutor, StepLog, Timeline
from smkern.runtime.sim import fast_forward
from smkern.runtime.sim.fast_forward import repeat
from tests.runtime.world import RUNGS, Linear, small_config

pytestmark = pytest.mark.slow

BLOCK = 8


class Asked(NamedTuple):
    """A request of a random trace."""

    arrival_us: float
    blocks: tuple[int, ...]
    prompt: int
    output: int
    priority: int

    def tokens(self, id_: int) -> list[int]:
        """Tokens that other requests share as far as they share blocks."""
        shared = min(len(self.blocks) * BLOCK, self.prompt // 4 * 4)
        known = [self.blocks[i // BLOCK] % 50 for i in range(shared)]
        return known + [(id_ + i) % 50 for i in range(self.prompt - shared)]


class Seen(NamedTuple):
    """What a replay was."""

    token_us: dict[int, list[float]]
    ends: list[int]
    cached: dict[int, int]
    preemptions: int
    launches: int
    end_us: float


def random_trace(seed: int, count: int) -> list[Asked]:
    draw, now_us, trace = Random(seed), 0.0, []
    # names that tell their tokens apart, whatever is in front of them
    trees = [tuple(Random(7 + i).sample(range(50), 3)) for i in range(4)]
    for _ in range(count):
        now_us += draw.choice((0.0, 20.0, 400.0, 4000.0)) * draw.random()
        tree = draw.choice(trees)[: draw.randrange(4)]
        prompt = max(1, len(tree) * BLOCK + draw.choice((-3, 0, 1, 5, 30)))
        trace.append(Asked(now_us, tree, prompt, draw.randrange(1, 40), draw.randrange(2)))
    return trace


def make(
    policy: Policy,
    *,
    checks: bool,
    num_pages: int,
    launch_us: float,
    reuse: bool = True,
    **options: Any,
) -> Any:
    device = SimDevice(
        132,
        RUNGS,
        Linear(),
        decode_launch_us=launch_us,
        prefill_launch_us=2 * launch_us,
        decode_gap_us=launch_us / 2,
    )
    executor = SimExecutor(
        small_config(), device, num_pages=num_pages, page_size=4, max_running=6, max_prefill=4,
        max_tokens=48, checks=checks, reuse=reuse,
    )  # fmt: skip
    return Multiplexer(executor, policy=policy, **options)


def submit(mux: Any, trace: list[Asked], is_virtual: bool) -> None:
    for id_, asked in enumerate(trace):
        prompt: Any = asked.tokens(id_)
        if is_virtual:
            prompt = VirtualTokens(asked.prompt, asked.blocks, block_tokens=BLOCK)
        params = SamplingParams(max_new_tokens=asked.output, ignore_eos=True)
        mux.submit(prompt, params, arrival_us=asked.arrival_us, priority=asked.priority)


def step_by_step(trace: list[Asked], policy: Policy, **options: Any) -> Seen:
    """Checked, with tokens, each handed out as it comes."""
    mux = make(policy, checks=True, **options)
    token_us: dict[int, list[float]] = {}

    def delivered(ids: list[int], at_us: float) -> None:
        for id_ in ids:
            token_us.setdefault(id_, []).append(at_us)

    mux._meter.delivered = delivered
    submit(mux, trace, False)
    done = [output.completion for output in mux.run() if output.completion is not None]
    assert mux._executor.hazards == []
    return seen(mux, token_us, done)


def replayed(trace: list[Asked], policy: Policy, **options: Any) -> Seen:
    """Without checks, tokens or a timeline, times from the log."""
    log, token_us, done = StepLog(), {}, []
    mux = make(policy, checks=False, log=log, timeline=Timeline.off(132), **options)
    submit(mux, trace, True)
    for output in mux.run():
        assert (output.token, output.error) == (None, None)
        token_us[output.id] = list(log.token_us(output.id))
        assert len(token_us[output.id]) == trace[output.id].output
        log.forget(output.id)
        done.append(output.completion)
    mux._executor.pool.check()
    return seen(mux, token_us, done)


def seen(mux: Any, token_us: dict[int, list[float]], done: list[Any]) -> Seen:
    return Seen(
        token_us,
        [completion.index for completion in done],
        {completion.index: completion.cached_tokens for completion in done},
        mux._preemptions,
        mux._executor.device.launches,
        mux._executor.device.now_us(),
    )


POLICIES = {
    "chunked": lambda: Chunked(chunk_tokens=12),
    "chunked, two steps ahead": lambda: Chunked(chunk_tokens=30, steps=2, ahead=True),
    "chunked under a limit": lambda: Chunked(predictor=Linear(), tbt_slo_ms=0.2),
    "split": lambda: StaticSplit(48, layers=1, preempt_shorter_than=6),
    "gang": lambda: StaticSplit(16, predictor=Linear(), steps=3, join="gang", move=False),
}


@pytest.mark.parametrize(("num_pages", "launch_us"), [(24, 0.0), (24, 3.0), (200, 3.0)])
@pytest.mark.parametrize("name", POLICIES)
def test_the_replay_is_the_step_by_step_run(name, num_pages, launch_us, monkeypatch):
    skipped: list[float] = []
    monkeypatch.setattr(
        fast_forward, "repeat", lambda *args: skipped.extend(ends := repeat(*args)) or ends
    )
    preempted = shared = 0
    for seed in range(3):
        trace = random_trace(seed, 24)
        options: dict[str, Any] = {"num_pages": num_pages, "launch_us": launch_us}
        if seed == 2:
            options["preemption"] = "keep"
        expected = step_by_step(trace, POLICIES[name](), **options)
        assert replayed(trace, POLICIES[name](), **options) == expected
        assert {k: len(v) for k, v in expected.token_us.items()} == {
            k: asked.output for k, asked in enumerate(trace)
        }
        preempted += expected.preemptions
        shared += sum(expected.cached.values())
    assert shared > 0
    assert (len(skipped) > 200) == (name != "gang")
    assert preempted > 0 or num_pages == 200


@pytest.mark.parametrize("name", sorted(smkern.policies.POLICIES))
def test_under_every_policy(name):
    """Also where a policy says that it decodes alone steadily, and is not asked at each step."""
    make_policy: Any = smkern.policies.POLICIES[name]
    trace = random_trace(11, 40)
    options: dict[str, Any] = {"num_pages": 60, "launch_us": 3.0}
    expected = step_by_step(trace, make_policy(predictor=Linear(), tbt_slo_ms=0.5), **options)
    assert replayed(trace, make_policy(predictor=Linear(), tbt_slo_ms=0.5), **options) == expected


def test_a_log_of_checked_requests_has_the_same_times():
    trace, log = random_trace(5, 30), StepLog()
    mux = make(POLICIES["split"](), checks=True, num_pages=40, launch_us=1.0, log=log)
    submit(mux, trace, False)
    found = {output.id: list(log.token_us(output.id)) for output in mux.run()}
    expected = step_by_step(trace, POLICIES["split"](), num_pages=40, launch_us=1.0)
    assert found == expected.token_us


def test_virtual_prompts_put_out_tokens_where_there_is_no_log():
    mux = make(Chunked(), checks=True, num_pages=64, launch_us=0.0)
    handle = mux.submit(VirtualTokens(9), SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert [output.token is None for output in mux.run()] == [False] * 5
    assert handle.completion.finish_reason == "length"
    assert (handle.completion.tokens, handle.completion.prompt_len) == ((), 9)


def test_a_request_that_is_cancelled_keeps_the_times_that_it_had():
    log = StepLog()
    mux = make(Chunked(), checks=False, num_pages=64, launch_us=0.0, log=log)
    first = mux.submit(VirtualTokens(9), SamplingParams(max_new_tokens=90, ignore_eos=True))
    other = mux.submit(VirtualTokens(9), SamplingParams(max_new_tokens=5, ignore_eos=True))
    outputs = mux.run()
    assert next(outputs).id == other.id
    first.cancel()
    assert list(outputs) == []
    assert len(log.token_us(first.id)) >= 5
    assert log.token_us(first.id)[:5] == log.token_us(other.id)
    mux.close()
    assert mux._executor.pool.poll() == mux._executor.pool.usage.held == 0


def test_virtual_prompts_are_refused_where_tokens_are_looked_at():
    mux = make(Chunked(), checks=False, num_pages=64, launch_us=0.0)
    with pytest.raises(RequestError, match=r"prompt 0 is of virtual tokens.*ignore_eos=True"):
        mux.submit(VirtualTokens(9), SamplingParams(max_new_tokens=5))
    with pytest.raises(RequestError, match="has 300 tokens, the context holds"):
        mux.submit(VirtualTokens(300), SamplingParams(ignore_eos=True))
    options = {"batch_invariant": True, "reuse": False}
    other = make(Chunked(), checks=False, num_pages=64, launch_us=0.0, **options)
    with pytest.raises(RequestError, match="batch_invariant=True compares tokens"):
        other.submit(VirtualTokens(9), SamplingParams(max_new_tokens=5, ignore_eos=True))
    mux._executor.pool.has_memory = True
    with pytest.raises(RequestError, match="which a model cannot read"):
        mux.submit(VirtualTokens(9), SamplingParams(max_new_tokens=5, ignore_eos=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"blocks": (-1,)}, "prompt 1 has a block named -1: names are whole numbers"),
        ({"blocks": (0, 2**63)}, "a block named 9223372036854775808: names"),
        ({"blocks": (0, 1.0)}, r"a block named 1\.0: names"),
        ({"blocks": (0,), "block_tokens": 10}, r"blocks of 10 tokens, the pool has pages of 4"),
    ],
)
def test_virtual_prompts_whose_blocks_cannot_be_are_refused_alone(given, message):
    """They would be found out in a step, which ends all requests."""
    mux = make(Chunked(), checks=False, num_pages=64, launch_us=0.0)
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    good = mux.submit(VirtualTokens(9, (1,), block_tokens=8), params)
    with pytest.raises(RequestError, match=message):
        mux.submit(VirtualTokens(9, **given), params)
    list(mux.run())
    assert good.completion is not None
    mux.close()


def test_random_ends_need_checks():
    with pytest.raises(ArgumentError, match=r"end_probability=0.5 with checks=False"):
        SimExecutor(small_config(), num_pages=8, checks=False, end_probability=0.5)


def test_a_log_drops_the_steps_of_those_forgotten():
    log = StepLog()
    for id_ in range(9000):
        log.add_tokens(id_, log.add_steps([float(id_)]), 1)
        if id_ != 8000:
            log.forget(id_)
    assert list(log.token_us(8000)) == [8000.0]
    assert log.num_steps == 9000
    assert len(log._times) == 1000
    assert list(log.token_us(5)) == []


def test_a_request_that_paused_has_steps_in_pieces():
    log = StepLog()
    log.add_steps([1.0, 2.0, 3.0, 4.0])
    log.add_tokens(0, 0, 2)
    log.add_tokens(0, 3, 1)
    assert list(log.token_us(0)) == [1.0, 2.0, 4.0]
