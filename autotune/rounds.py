"""Times of a cell's candidates, in interleaved rounds of as much device time as is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from smkern.autotune.places import Place
from smkern.bench.timing import Call, Case, Timing, calls_for, rounds_for, time_interleaved

C = TypeVar("C")


def time_candidates(
    calls: Mapping[C, Call],
    place: Place,
    expected_us: float,
    errors: dict[C, str],
    *,
    budget_us: float,
    at_most: int = 32,
) -> dict[C, Timing]:
    """The timings of the candidates' calls on the place's stream; `errors` gets who failed.

    Args:
        expected_us: of the fastest, by the model.
        budget_us: device time that the rounds may take, about.
        at_most: calls of one candidate in a round.
    """
    if not calls:
        return {}
    names = {str(index): config for index, config in enumerate(calls)}
    cases = {
        name: Case(calls[config], place.stream, calls_for(expected_us, at_most=at_most), index)
        for index, (name, config) in enumerate(names.items())
    }
    round_us = sum(expected_us * case.calls for case in cases.values())
    rounds = rounds_for(round_us, budget_us=budget_us, at_least=3, at_most=9)
    failed: dict[str, str] = {}
    timings = time_interleaved(cases, rounds=rounds, errors=failed)
    errors.update({names[name]: message for name, message in failed.items()})
    return {names[name]: timing for name, timing in timings.items()}
