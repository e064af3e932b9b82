"""Who is served when: order, deadlines of pages, look-ahead; on the simulated GPU."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from smkern.errors import ArgumentError
from smkern.policies import Chunked, Decision, Snapshot, StaticSplit
from smkern.runtime.executor import cut
from smkern.runtime.request import Request
from smkern.runtime.sim.rows import AFTER_END
from tests.runtime.policies import RandomPolicy, Scripted
from tests.runtime.world import World, prompts

POLICIES: dict[str, Any] = {
    "chunks": lambda: Chunked(chunk_tokens=16),
    "a split": lambda: StaticSplit(48, layers=1, max_prefill_tokens=32),
    "a split with preemption": lambda: StaticSplit(48, layers=1, preempt_shorter_than=6),
}
each_policy = pytest.mark.parametrize("policy", POLICIES)


def first_tokens(world: World) -> list[int]:
    """Requests in the order of their first tokens."""
    return list(dict.fromkeys(output.id for _, output in world.outputs))


# Order.


@pytest.mark.parametrize("policy", ["chunks", "a split"])
def test_first_come_first_served(policy: str) -> None:
    world = World(POLICIES[policy](), end_probability=0.0, reuse=False, max_prefill=1)
    for text in prompts(12, 3, longest=30):
        world.submit(text, 6)
        world.step()
    world.finish()
    assert first_tokens(world) == list(range(12))


@each_policy
def test_high_priorities_go_first(policy: str) -> None:
    world = World(POLICIES[policy](), end_probability=0.0, max_prefill=1, reuse=False)
    wanted = [0, 2, 1, 2, 0, 1]
    for priority in wanted:
        world.submit([priority] * 20, 4, priority=priority)
    world.finish()
    assert first_tokens(world) == sorted(range(6), key=lambda id_: -wanted[id_])


@each_policy
def test_nobody_starves_while_others_keep_coming(policy: str) -> None:
    """A long prompt among short ones that come faster than they can be served."""
    world = World(POLICIES[policy](), num_pages=40, end_probability=0.0)
    draw = Random(1)
    for _ in range(8):
        world.submit([draw.randrange(50) for _ in range(5)], 8)
    long = world.submit([draw.randrange(50) for _ in range(100)], 8)
    for _ in range(400):
        if long.done:
            break
        while sum(not handle.done for handle in world.handles) < 12:
            world.submit([draw.randrange(50) for _ in range(draw.randint(1, 5))], 8)
        world.turn(20.0)
    assert long.done, f"{long}: {len(world.handles)} came meanwhile"
    world.finish()


def test_a_request_comes_when_it_is_due() -> None:
    world = World(end_probability=0.0)
    dues = [3000.0, 1000.0, 2000.0]
    for due in dues:
        world.submit([1, 2, 3], 2, arrival_us=due)
    outputs = list(world.mux.run())
    assert list(dict.fromkeys(output.id for output in outputs)) == [1, 2, 0]
    assert world.device.now_us() >= 3000.0
    assert world.mux.stats().ttft_us.max < 500.0


# Pages that run out.


@pytest.mark.parametrize("preemption", ["recompute", "keep"])
@each_policy
def test_the_last_gives_way_and_comes_back(policy: str, preemption: Any) -> None:
    """Requests that fit when they come, but not with all that they generate."""
    world = World(
        POLICIES[policy](), num_pages=20, page_size=4, end_probability=0.0, preemption=preemption
    )
    handles = [world.submit([id_] * 14, 40) for id_ in range(4)]
    world.finish()
    assert world.mux.stats().preemptions
    assert all(len(handle.tokens) == 40 for handle in handles)
    ends = [output.id for _, output in world.outputs if output.completion is not None]
    assert ends[0] == 0, "the first never gives way"


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_fewer_steps_where_pages_are_short(steps: int) -> None:
    world = World(StaticSplit(48, steps=steps), num_pages=10, page_size=4, end_probability=0.0)
    first = world.submit([1] * 12, 26)
    world.finish()
    assert len(first.tokens) == 26
    assert not world.mux.stats().preemptions


def test_a_request_alone_may_take_every_page() -> None:
    for length, new in ((1, 40), (39, 2), (20, 21), (40, 1)):
        world = World(num_pages=10, page_size=4, end_probability=0.0)
        handle = world.submit([1] * length, new)
        world.finish()
        assert len(handle.tokens) == new


# The batch-invariant mode.


@pytest.mark.parametrize("least", [0, 8])
def test_cuts_make_no_small_chunks(least: int) -> None:
    for length in range(1, 60):
        for room in range(1, 60):
            left, counts = length, []
            while left:
                count = cut(left, room, least)
                if not count:
                    break
                counts.append(count)
                left -= count
            assert all(0 < count <= room for count in counts)
            if least and length > least:
                assert all(count > least for count in counts)


def test_every_prompt_ends_in_chunks_of_eighteen() -> None:
    """No chunk is too small, and none is waited for for ever; a smaller room is widened."""
    for length in range(1, 60):
        left = length
        while left:
            count = cut(left, 18, 8)
            assert count, f"{left} of {length} tokens are left, and 18 may run"
            left -= count


@pytest.mark.parametrize("chunk", [9, 12, 17, 18, 40])
def test_small_chunks_stop_nobody_in_the_invariant_mode(chunk: int) -> None:
    world = World(Chunked(chunk_tokens=chunk), batch_invariant=True, end_probability=0.0)
    chunks: list[tuple[Request, int]] = []
    mixed = world.executor.mixed

    def spy(given: Any, requests: Any) -> Any:
        chunks.extend((chunk.request, chunk.count) for chunk in given)
        return mixed(given, requests)

    world.executor.mixed = spy  # type: ignore[method-assign]
    lengths = (3, 8, 9, 10, 17, 18, 30, 45)
    for length in lengths:
        world.submit([length] * length, 12)
    world.finish(most_steps=3000)
    assert all(count > 8 or request.prompt_len <= 8 for request, count in chunks)
    assert len(world.ended) == len(lengths)


def test_the_invariant_mode_finds_no_prefixes_again() -> None:
    with pytest.raises(ArgumentError, match="make it with reuse=False"):
        World(batch_invariant=True, reuse=True)


def short_of_pages() -> World:
    """Whose requests begin anew, and get the same tokens."""
    return World(
        StaticSplit(48, steps=3), batch_invariant=True, num_pages=16, page_size=4,
        end_probability=0.0,
    )  # fmt: skip


def test_a_request_that_begins_anew_emits_nothing_twice() -> None:
    world = short_of_pages()
    handles = [world.submit([id_] * 10, 30) for id_ in range(3)]
    world.finish()
    assert world.mux.stats().preemptions
    assert all(len(handle.tokens) == 30 for handle in handles)


def test_a_model_that_draws_another_token_again_is_named() -> None:
    """The mode was promised, and the model does not keep it."""
    world = short_of_pages()
    source = world.executor._source
    original, began = source.token, set()

    def drifting(key: int, position: int) -> int:
        token = original(key, position)
        again = (key, position) in began
        began.add((key, position))
        return (token + again) % 40

    source.token = drifting  # type: ignore[method-assign]
    world.expected.clear()
    handles = [world.mux.submit([id_] * 10, None) for id_ in range(3)]
    list(world.mux.run())
    wrong = [handle for handle in handles if handle.error is not None]
    assert wrong
    assert all("is not batch-invariant" in str(handle.error) for handle in wrong)
    while world.executor.pool.poll():  # a step that was launched ahead may read pages still
        world.wait(100.0)
    assert world.executor.pool.usage.held == 0


# Look-ahead.


@pytest.mark.parametrize("steps", range(1, 7))
def test_an_end_inside_a_look_ahead_wastes_at_most_the_rest_of_it(steps: int) -> None:
    """k-1 rows of each request, and none of them comes out."""
    world = World(StaticSplit(48, steps=steps, layers=4), end_probability=0.15, max_running=8)
    wasted: dict[int, int] = {}
    decode = world.executor.decode

    def spy(requests: Any, count: int) -> Any:
        works = decode(requests, count)
        for _, draw in works:
            read = draw.read

            def counted(read: Any = read, draw: Any = draw) -> list[int]:
                tokens: list[int] = read()
                for request, token in zip(draw.requests, tokens, strict=True):
                    if token == AFTER_END:
                        wasted[request.index] = wasted.get(request.index, 0) + 1
                return tokens

            draw.read = counted
        return works

    world.executor.decode = spy  # type: ignore[method-assign]
    for text in prompts(20, 2, longest=20):
        world.submit(text, 40)
    world.finish(wait_us=3.0)
    assert any(end == "stop" for end in world.ended.values())
    assert max(wasted.values(), default=0) <= steps - 1, wasted


def test_steps_follow_each_other_without_a_gap() -> None:
    """With a look-ahead the next steps are launched before the last one is over."""
    world = World(StaticSplit(48, steps=2, move=False), end_probability=0.0)
    world.submit([1] * 10, 40)
    list(world.mux.run())
    spans = sorted(
        flight.event.times_us() for flight in world.watch.in_flight if flight.job.kind == "decode"
    )
    world.watch.in_flight.clear()
    gaps = [later[0] - earlier[1] for earlier, later in pairwise(spans)]
    assert max(gaps, default=0.0) == 0.0


def test_decode_may_pause() -> None:
    """While a prompt runs, where the policy says so."""

    def decide(snapshot: Snapshot) -> Decision:
        if snapshot.prefill is not None:
            return Decision(rung=48, layers=1, pause_decode=True)
        if snapshot.waiting:
            ids = (snapshot.waiting[0].id,)
            return Decision(rung=48, prefill=ids, layers=1, pause_decode=True)
        return Decision(rung=48)

    world = World(Scripted([], then=decide), end_probability=0.0)
    world.submit([1] * 10, 20)
    world.until(lambda: len(world.tokens[0]) >= 5)
    world.submit([2] * 40, 5)
    begun = len(world.watch.launched)
    world.finish()
    assert world.watch.launched[begun : begun + 4].count("decode") <= 1


@pytest.mark.parametrize("seed", range(5))
def test_gangs_meet_at_their_ends(seed: int) -> None:
    """No launch of the next gang before both sides of this one are over."""

    class Gangs(RandomPolicy):
        def decide(self, snapshot: Snapshot) -> Decision:
            found = super().decide(snapshot)
            return Decision(
                found.rung, found.prefill, found.chunk_tokens, found.layers, found.steps,
                "gang", found.preempt, found.pause_decode,
            )  # fmt: skip

    policy = Gangs(seed)
    world = World(policy)
    asked: list[int] = []
    decide = policy.decide

    def spy(snapshot: Snapshot) -> Decision:
        asked.append(world.watch.num_in_flight)
        decision: Decision = decide(snapshot)
        return decision

    policy.decide = spy  # type: ignore[method-assign]
    for text in prompts(10, seed):
        world.submit(text, 8)
    world.finish()
    assert len(asked) > 20
    assert set(asked) == {0}


def test_a_policy_may_let_decode_run_between_two_layers_on_the_whole_device() -> None:
    """Turns are taken where it asks for layers, and nowhere else."""
    asked: dict[int, int] = {}

    def decide(snapshot: Snapshot) -> Decision:
        if snapshot.prefill is None:
            ids = tuple(request.id for request in snapshot.waiting)
            return Decision(prefill=ids, layers=1 if ids and snapshot.batch else 0)
        launched = snapshot.prefill.layers_launched
        asked[launched] = asked.get(launched, 0) + 1
        if asked[launched] == 3:  # decode goes first, and then it thinks better of it
            return Decision(layers=1)
        return Decision(layers=1, pause_decode=True) if asked[launched] > 5 else Decision()

    world = World(Scripted([], then=decide), end_probability=0.0)
    world.submit([1, 2], 60)
    world.until(lambda: world.tokens[0], 20.0)
    world.submit([3] * 20, 5)
    world.finish()
    assert not world.mux.errors
    names = "".join(span.name[0] for span in world.mux.timeline.trace().spans)
    assert "pdddddpdddddp" in names


@pytest.mark.parametrize("steps", [1, 2])
def test_no_token_waits_for_layers_to_be_launched(steps: int) -> None:
    """Whether the device has its next decode step or is given it first: layers come behind."""
    policy = StaticSplit(48, layers=1, steps=steps, max_prefill_tokens=16)
    launching = {"decode_launch_us": 1.0, "prefill_launch_us": 30.0}
    world = World(policy, device=launching, end_probability=0.0, reuse=False)
    for text in prompts(6, 1, longest=40):
        world.submit(text, 30)
    world.finish(wait_us=1.0)
    spans = [x for x in world.mux.timeline.trace().spans if x.lane == "decode"]
    # A first token goes out as the step begins that its second follows.
    seen_us = {x.seen_us for x in spans} | {min(x.begin_us for x in spans)}
    late_us = [min(at_us - x for x in seen_us if x <= at_us) for at_us, _ in world.outputs]
    assert max(late_us) <= 2.0
