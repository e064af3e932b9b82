"""What a prompt length that comes for the first time costs the host, and one that came before.

The plan of a prompt and the eight launches of its first layer, on a driver that does nothing:
`--benchmark-enable bench/micro`. `calls` in extra_info is the count of Python and C functions
called, which is the same on every machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from smkern.bench.micro.fake_layer import FakeLayer, without_driver

LENGTHS = range(600, 4000)
KNOWN, ROUNDS = 40, 100
PARTS = ("layer", "plan", "input_norm", "qkv", "append", "attention", "o", "gate_up", "down")


class Prompts:
    """A layer that has seen a few lengths, and lengths that it has not."""

    def __init__(self) -> None:
        self.layer = FakeLayer()
        order = random.Random(1).sample(LENGTHS, len(LENGTHS))
        self.known, self._new = order[:KNOWN], iter(order[KNOWN:])
        for m in self.known:
            self.run(m)

    def run(self, m: int) -> None:
        for call in self.layer.calls(m).values():
            call()

    def part(self, name: str, m: int) -> list[Callable[[], Any]]:
        """Calls of a length, those ahead of them done."""
        calls = self.layer.calls(m)
        if name == "layer":
            return list(calls.values())
        if name == "attention":
            calls["plan"]()
        return [calls[name]]

    def new(self) -> int:
        return next(self._new)


@pytest.fixture(scope="module")
def prompts() -> Iterator[Prompts]:
    with without_driver():
        yield Prompts()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "again"])
def test_a_length(benchmark, prompts, first, part):
    def setup() -> tuple[tuple[list[Callable[[], Any]]], dict[str, Any]]:
        m = prompts.new() if first else random.choice(prompts.known)
        return (prompts.part(part, m),), {}

    counted = sorted(count(*setup()[0]) for _ in range(20))
    benchmark.extra_info["calls"] = counted[len(counted) // 2]
    benchmark.pedantic(run_all, setup=setup, rounds=ROUNDS, warmup_rounds=5)


def run_all(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def count(calls: list[Callable[[], Any]]) -> int:
    """Functions that the calls call."""
    found = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        run_all(calls)
    finally:
        sys.setprofile(None)
    return found
