"""Seeded cases for fuzzers: a few in `make test`, hours of them by `make fuzz`.

    def test_lengths_are_served_or_refused_by_name(cases):
        for random in cases(200):              # 200 in `make test`
            with suppress(SmkernError):        # any other error fails the test
                serve(random.choice([-1, 0, 2**70]))

A case depends on the seed, the test's name and the case's number alone, so that a failure can be
run again by the variables that it prints.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from itertools import count
from random import Random

import pytest

HOURS = float(os.environ.get("SMKERN_FUZZ_HOURS", "0"))
"""How long all fuzzers of a run take together; 0: each the few cases that it asks for."""
SEED = os.environ.get("SMKERN_TEST_SEED") or (str(secrets.randbits(31)) if HOURS else "0")
FIRST = int(os.environ.get("SMKERN_FUZZ_CASE", "0"))

Cases = Callable[[int], Iterator[Random]]


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[Cases]:
    """cases(few): a `Random` for each case."""
    items = request.session.items
    fuzzers = sum("cases" in getattr(item, "fixturenames", ()) for item in items)
    number = FIRST

    def seeded(few: int) -> Iterator[Random]:
        nonlocal number
        end = time.monotonic() + HOURS * 3600 / fuzzers
        for number in count(FIRST):
            if time.monotonic() >= end if HOURS else number >= FIRST + few:
                return
            yield Random(f"{SEED} {request.node.name} {number}")

    yield seeded
    print(f"the last case: SMKERN_TEST_SEED={SEED} SMKERN_FUZZ_CASE={number}")
