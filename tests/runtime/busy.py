"""Worlds with requests at several stages, for tests of what happens to them."""

from __future__ import annotations

from typing import Any

import pytest

from smkern.policies import Chunked, StaticSplit
from tests.runtime.policies import RandomPolicy
from tests.runtime.world import World, prompts

TEXTS = prompts(12, 5, longest=40)
EVERY_POLICY = {
    "chunks": lambda: Chunked(chunk_tokens=16),
    "a split": lambda: StaticSplit(48, layers=1, max_prefill_tokens=32),
    "random": lambda: RandomPolicy(3),
}
each_policy = pytest.mark.parametrize("policy", EVERY_POLICY)


def split() -> StaticSplit:
    return StaticSplit(48, layers=1, max_prefill_tokens=48, move=False)


def busy(policy: Any = None, count: int = 6, new: int = 10, **options: Any) -> World:
    """A world with requests at several stages."""
    world = World(split() if policy is None else policy, end_probability=0.0, **options)
    for text in TEXTS[:count]:
        world.submit(text, new)
    return world


def survivors(world: World) -> list[int]:
    return [id_ for id_, end in world.ended.items() if end in ("stop", "length")]
