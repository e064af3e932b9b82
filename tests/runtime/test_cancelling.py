"""Cancelling a request at every stage: pages come back, and the others go on."""

from __future__ import annotations

from typing import Any

import pytest

from smkern.errors import ArgumentError
from smkern.policies import StaticSplit
from tests.runtime.busy import EVERY_POLICY, TEXTS, busy, survivors
from tests.runtime.world import World


@pytest.mark.parametrize("who", [7, -1, "0", None, 1.0])
def test_cancelling_what_is_no_request(who: Any) -> None:
    world = World()
    world.submit([1, 2], 2)
    with pytest.raises(ArgumentError, match="there were 1 of them here"):
        world.mux.cancel(who)
    world.finish()


def _stage(world: World, id_: int) -> str:
    return world.handles[id_]._request.stage


def in_future(world: World) -> int:
    return world.submit(TEXTS[7], 5, arrival_us=world.device.now_us() + 1e5).id


def while_waiting(world: World) -> int:
    id_ = world.submit(TEXTS[7], 5).id
    assert _stage(world, id_) == "waiting"
    return id_


def while_prefilling(world: World) -> int:
    id_ = world.submit(TEXTS[7], 5).id
    world.until(lambda: _stage(world, id_) == "prefill")
    return id_


def with_its_last_layers_launched(world: World) -> int:
    id_ = while_prefilling(world)
    world.until(lambda: not world.watch.batches or _stage(world, id_) != "prefill")
    return id_


def at_its_first_token(world: World) -> int:
    id_ = world.submit(TEXTS[7], 5).id
    world.until(lambda: world.tokens[id_])
    return id_


def while_decoding(world: World) -> int:
    id_ = world.submit(TEXTS[7], 9).id
    world.until(lambda: len(world.tokens[id_]) >= 4)
    return id_


def when_done(world: World) -> int:
    id_ = world.submit(TEXTS[7], 2).id
    world.until(lambda: world.handles[id_].done)
    return id_


def when_half_a_prompt_is_computed(world: World) -> int:
    id_ = world.submit([*TEXTS[7], *range(40), *TEXTS[6]][:80], 5).id
    world.until(lambda: 0 < world.handles[id_]._request.num_computed < 80)
    return id_


STAGES = [
    in_future, while_waiting, while_prefilling, with_its_last_layers_launched,
    at_its_first_token, while_decoding, when_done, when_half_a_prompt_is_computed,
]  # fmt: skip


LAYERS_ALONE = (while_prefilling, with_its_last_layers_launched)
"""Stages that policies which prefill in chunks may not have."""
CANCELLED = [
    (policy, stage)
    for policy in EVERY_POLICY
    for stage in STAGES
    if policy == "a split" or stage not in LAYERS_ALONE
]


@pytest.mark.parametrize("others", [0, 3])
@pytest.mark.parametrize(("policy", "stage"), CANCELLED)
def test_cancelling_at_every_stage(policy: str, stage: Any, others: int) -> None:
    world = busy(EVERY_POLICY[policy](), others)
    id_ = stage(world)
    was_done = world.handles[id_].done
    world.cancel(id_)
    assert world.handles[id_].done
    assert world.handles[id_].cancelled != was_done
    world.handles[id_].cancel()
    world.finish()
    assert len(survivors(world)) == others + was_done


def test_cancelling_a_whole_batch_between_its_layers() -> None:
    """Nothing else is there, and its pages come back all the same."""
    world = World(StaticSplit(48, layers=1, max_prefill_tokens=48, move=False))
    ids = [world.submit(text, 4).id for text in ([1] * 20, [2] * 20)]
    world.until(lambda: [done for _, done in world.watch.batches] == [2])
    for id_ in ids:
        world.cancel(id_)
    world.finish()


def test_cancelling_a_batch_and_the_one_that_it_preempted() -> None:
    policy = StaticSplit(48, layers=1, preempt_shorter_than=10, max_prefill_tokens=48)
    world = World(policy)
    long = world.submit([1] * 40, 4)
    world.until(lambda: world.watch.batches)
    short = world.submit([2] * 3, 4)
    world.until(lambda: len(world.watch.batches) == 2)
    third = world.submit([3] * 5, 4)
    world.cancel(long.id)
    world.cancel(short.id)
    world.finish()
    assert survivors(world) == [third.id]
