"""One cell measured: every candidate checked, timed in interleaved rounds, the best ones again.

Calls follow each other as in a model's forward pass: ours may begin while the one before ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from math import nan
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from smkern.autotune.raw import Measurement
from smkern.errors import SmkernError
from smkern.measure.partitions import Place
from smkern.measure.timing import (
    Call,
    Case,
    Timing,
    calls_for,
    first_line,
    rounds_for,
    time_interleaved,
    try_eagerly,
)
from smkern.tuning.cells import Tuned

P = TypeVar("P")
C = TypeVar("C", bound=Hashable)

FINALISTS_WITHIN = 1.06
"""Candidates this close to the fastest are timed again in more rounds."""
CALLS_A_GRAPH = 32
"""At most: a capture costs the host some 6 us a launch."""
BUDGET_US = 12_000.0
"""Device time that a cell's first rounds may take; the finals take about half."""


class Tuner(ABC, Generic[P, C]):
    """Measures cells on one case's operands, made once; `place` is the partition of each.

    Attributes:
        name: The operator's, in the record.
        tolerance: Largest |x - reference| / |reference| of a result.
    """

    name: str
    tolerance: float

    @abstractmethod
    def launches(self, problem: P, place: Place, config: C) -> Sequence[Callable[[], object]]:
        """A launch of a configuration on the place's stream for each set of operands."""

    @abstractmethod
    def results(self, problem: P) -> Sequence[Tensor]:
        """The tensors that a call of set 0 writes."""

    @abstractmethod
    def expected(self, problem: P) -> Sequence[Tensor]:
        """The reference's results on set 0."""

    def call(self, problem: P, place: Place, config: C) -> Call:
        """Launches of a configuration; call(i) uses operand set i."""
        launches = self.launches(problem, place, config)
        count = len(launches)
        return lambda i: launches[i % count]()

    def poison(self, problem: P) -> None:
        """Set 0 as before its first call, its results such that a missing element is found."""
        for x in self.results(problem):
            x.fill_(nan if x.is_floating_point() else -1)

    def order(self, problem: P, config: C) -> Hashable:
        """Candidates whose sums have one order must agree to the bit; None: any bits will do."""
        return 0

    def prepare(self, problem: P, place: Place) -> None:
        """Once before a cell."""

    def recover(self, problem: P, place: Place) -> None:
        """After a launch that failed or was wrong; calls made before stay in use."""

    def measure(
        self, problem: P, place: Place, wanted: Mapping[C, float]
    ) -> list[Measurement[P, C]]:
        """The times of the configurations in `place`, in their order.

        Args:
            problem: What the operands are for.
            place: A partition, or the whole device.
            wanted: Configurations and the times that a model predicts, us.
        """
        errors: dict[C, str] = {}
        calls: dict[C, Call] = {}
        firsts: dict[Hashable, list[Tensor]] = {}
        expected = self.expected(problem)
        self.prepare(problem, place)
        for config in wanted:
            try:
                call = self.call(problem, place, config)
            except (SmkernError, RuntimeError) as error:
                errors[config] = first_line(error)[:200]
                continue
            message = self._check(call, problem, place, config, expected, firsts)
            if message is None:
                calls[config] = call
            else:
                errors[config] = message
                self.recover(problem, place)
        timings = time_candidates(calls, place, min(wanted.values(), default=1.0), errors)
        found = []
        for config, predicted_us in wanted.items():
            timing = timings.get(config)
            us, noise = (nan, nan) if timing is None else (timing.us_median, timing.noise)
            message = errors.get(config, "not measured") if timing is None else None
            found.append(
                Measurement(
                    problem, place.budget, config, us, noise, predicted_us, message, self.name
                )
            )  # fmt: skip
        return found

    def _check(
        self,
        call: Call,
        problem: P,
        place: Place,
        config: C,
        expected: Sequence[Tensor],
        firsts: dict[Hashable, list[Tensor]],
    ) -> str | None:
        """Run the call once: why its results are wrong, or None."""
        self.poison(problem)
        torch.cuda.synchronize()
        message = try_eagerly(call, place.stream)
        if message is not None:
            return message
        got = self.results(problem)
        for x, y in zip(got, expected, strict=True):
            relative = _error(x, y)
            if not relative < self.tolerance:
                return f"wrong result: |x - reference| / |reference| is {relative:.3g}"
        order = self.order(problem, config)
        if order is None:
            return None
        if order not in firsts:
            firsts[order] = [x.clone() for x in got]
        elif not all(torch.equal(x, y) for x, y in zip(got, firsts[order], strict=True)):
            return "other bits than another candidate"
        return None


def _error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|; NaN where elements were not written."""
    if not got.is_floating_point():
        got, wanted = got.double(), wanted.double()
    norm, kind = torch.linalg.vector_norm, torch.promote_types(wanted.dtype, torch.float32)
    return float(norm(got - wanted, dtype=kind) / norm(wanted, dtype=kind).clamp_min(1e-30))


def time_candidates(
    calls: Mapping[C, Call],
    place: Place,
    expected_us: float,
    errors: dict[C, str],
) -> dict[C, Timing]:
    """The timings of the candidates' calls on the place's stream; `errors` gets who failed.

    Args:
        calls: Each has run once.
        place: Its stream runs the calls.
        expected_us: The model's time of the fastest.
        errors: Gets the errors of candidates that cannot be captured.
    """
    if not calls:
        return {}
    configs = dict(zip(map(str, range(len(calls))), calls, strict=True))
    failed: dict[str, str] = {}

    def run(names: Sequence[str], us: float, least: int, most: int) -> dict[str, Timing]:
        count = calls_for(us, at_most=CALLS_A_GRAPH)
        cases = {x: Case(calls[configs[x]], place.stream, count, int(x)) for x in names}
        round_us = us * count * len(cases)
        rounds = rounds_for(round_us, budget_us=BUDGET_US, at_least=least, at_most=most)
        return time_interleaved(cases, rounds=rounds, errors=failed)

    timings = run(list(configs), expected_us, 1, 3)
    best = min((timing.us_median for timing in timings.values()), default=nan)
    finalists = [x for x in timings if timings[x].us_median <= FINALISTS_WITHIN * best]
    if len(finalists) > 1:
        timings |= run(finalists, best, 3, 7)
    errors.update({configs[name]: message for name, message in failed.items()})
    return {configs[name]: timing for name, timing in timings.items() if name not in failed}


def best_cell(
    found: Sequence[Measurement[Any, C]], *, same_within: float = 1.015
) -> Tuned[C] | None:
    """The fastest, or the first (the model's choice) where it is as fast; None where none ran."""
    fine = [item for item in found if item.error is None]
    if not fine:
        return None
    fastest = min(fine, key=lambda item: item.us)
    if fine[0] is found[0] and fine[0].us <= same_within * fastest.us:
        fastest = fine[0]
    return Tuned(fastest.config, fastest.us)
