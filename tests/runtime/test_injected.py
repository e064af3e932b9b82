"""A fault at every call that a runtime makes of what it is given: found by a run without one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import isfunction
from typing import Any
from zlib import crc32

import pytest

from smkern.models.tokenizer import Tokenizer
from smkern.policies import Policy
from smkern.runtime.device import Device, Event
from smkern.runtime.executor import Executor
from tests.runtime.ends import Served, recorded, simulated
from tests.runtime.injected import KINDS, Calls, Fault, PlantedError, Stand
from tests.runtime.tensors import one_thread, with_tensors

pytestmark = pytest.mark.slow

SIMULATED = recorded(simulated)
with one_thread():
    COMPUTED = recorded(with_tensors)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def spoiled(serve: Any, fault: Fault) -> Served:
    served: Served = serve(fault)
    served.live()
    served.check()
    return served


def check_fault(serve: Any, site: str, turn: int, kind: str) -> None:
    """A fault at a call's turn; where a busy machine polls less often, at an earlier one."""
    while not spoiled(serve, Fault(site, turn, kind)).calls.has_failed:
        assert turn > 1
        turn //= 2


@pytest.mark.parametrize("site", sorted(SIMULATED))
def test_a_fault_at_a_call_on_the_simulator(site: str) -> None:
    count = SIMULATED[site]
    for at, kind in enumerate(KINDS):
        turn = (1, (count + 1) // 2, count - count // 8)[at % 3]
        check_fault(simulated, site, turn, kind)


@pytest.mark.parametrize("site", sorted(COMPUTED))
def test_a_fault_at_a_call_with_tensors(site: str) -> None:
    """Tokens are a model's, so that one which is lost or another's shows."""
    at = crc32(site.encode())
    kind, turn = KINDS[at % len(KINDS)], (COMPUTED[site] + 1) // 2
    check_fault(with_tensors, site, turn, kind)


@pytest.mark.parametrize("turn", range(1, COMPUTED["work.run"], 16))
def test_a_launch_that_raises_behind_what_it_launched(turn: int) -> None:
    """Who goes on has the token that it drew all the same once, neither lost nor twice."""
    spoiled(with_tensors, Fault("work.run", turn, "raise behind"))


def test_a_text_that_fails_while_later_tokens_of_its_request_are_kept() -> None:
    """Who ends by an error gets no token of the steps behind, which were read with it."""
    spoiled(partial(simulated, seed=701), Fault("tokenizer.decode", 30, "wrong type"))


NOT_SERVING = {"executor.memory_report"}
"""Calls that an owner asks for, and that are nothing to requests."""


def test_every_call_of_the_protocols_is_one_of_these() -> None:
    """Else it is made nowhere, or these lives do not reach it."""
    protocols = {
        "executor": Executor, "device": Device, "event": Event, "policy": Policy,
        "tokenizer": Tokenizer,
    }  # fmt: skip
    calls = {
        f"{role}.{name}"
        for role, protocol in protocols.items()
        for name, value in vars(protocol).items()
        if isfunction(value) and not name.startswith("_")
    }
    reached = SIMULATED.keys() | COMPUTED.keys()
    assert calls - NOT_SERVING <= reached
    assert {"draw.read", "work.run", "work.left", "predictor.alone_us", "policy.order"} <= reached
    assert len([site for site in reached if site.startswith("pool.")]) >= 9


class Thing:
    @property
    def size(self) -> int:
        return 3

    def parts(self, count: int) -> list[int]:
        return list(range(count))


@pytest.mark.parametrize(
    ("kind", "answer"), [("too few", [0]), ("too many", [0, 1, 1]), ("late", [0, 1])]
)
def test_a_stand_counts_calls_and_spoils_the_one_that_is_asked_for(kind, answer) -> None:
    spent: list[float] = []
    calls = Calls(Fault("thing.parts", 2, kind), spent.append)
    thing = Stand(Thing(), "thing", calls)
    assert thing.parts(2) == [0, 1]
    assert not calls.counts, "not while it is made ready"
    calls.is_armed = True
    assert [thing.parts(2) for _ in range(3)] == [[0, 1], answer, [0, 1]]
    assert thing.size == 3
    assert calls.counts == {"thing.parts": 3, "thing.size": 1}
    assert bool(spent) == (kind == "late")


def test_a_stand_raises_what_is_planted() -> None:
    calls = Calls(Fault("thing.size", 1, "raise"), lambda us: None)
    calls.is_armed = True
    with pytest.raises(PlantedError):
        _ = Stand(Thing(), "thing", calls).size
