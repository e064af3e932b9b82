"""The tuner of a table of small operators, as the command wants it: cases, candidates, cells."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from smkern.autotune import sitting
from smkern.autotune.places import Place
from smkern.autotune.sitting import Outcome, Request, Sitting
from smkern.autotune.small import SmallMeasurement, SmallTuner
from smkern.device import Budget
from smkern.ops.small import Small
from smkern.profile import Profile
from smkern.tuning.cells import CellFile, Tuned

SAME_WITHIN = 1.015
"""Times so close are one; the model's choice is kept then."""


class Job(NamedTuple):
    """One cell to measure."""

    case: Any
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A table's operators. A case has a `name` and a `problem`.

    Args:
        key: A cell's key, of a problem in a budget.
        codec: Of the table.
        candidates: Configurations of a problem in a budget on the profile's device.
        choose: The model's choice.
        predict: The model's time of one, us.
        dispatcher: Of a device.
        calls: A case's operator, and calls with results on a device.
        tuner: What measures a case: of its operator, the dispatcher, its calls and `predict`.
        most: Candidates that are measured at most.
        compiles: Whether variants are compiled side by side before the first cell.
    """

    key: Callable[[Any, Budget], Any]
    codec: Any
    candidates: Callable[[Any, Budget, Profile], Sequence[Any]]
    choose: Callable[[Any, Budget, Profile], Any]
    predict: Callable[[Any, Any, Budget, Profile], float]
    dispatcher: Callable[[int], Any]
    calls: Callable[[Any, str], tuple[Small[Any], list[Any]]]
    tuner: Callable[..., SmallTuner[Any, Any]] = SmallTuner
    most: int | None = None
    compiles: bool = True

    def listed(self, problem: Any, budget: Budget, profile: Profile) -> tuple[Any, ...]:
        """The candidates of a cell, the model's choice first, then by its prediction.

        Where launches may overlap, the two first are also measured apart.
        """
        first = self.choose(problem, budget, profile)

        def order(config: Any) -> tuple[bool, float]:
            return config != first, self.predict(problem, config, budget, profile)

        found = sorted(self.candidates(problem, budget, profile), key=order)[: self.most]
        apart = [replace(x, pdl=False) for x in found[:2]] if budget.confined == "mask" else []
        return (*found, *apart)

    def describe(self, request: Request[Any], profile: Profile) -> None:
        """Print what would be measured on the profile's GPU; needs none."""
        sitting.describe(
            request, profile, lambda case, budget: self.listed(case.problem, budget, profile)
        )

    def jobs_of(
        self, request: Request[Any], places: Sequence[Place], done: Callable[[Any], bool]
    ) -> Iterator[Job]:
        """Cells that are not done, a case after the other, so that its operands are made once."""
        for case in request.cases:
            for place in places:
                if not done(self.key(case.problem, place.budget)):
                    yield Job(case, place)

    def tuner_of(self, case: Any, dispatcher: Any, device: str = "cuda") -> SmallTuner[Any, Any]:
        """What measures a case's cells."""
        op, calls = self.calls(case, device)

        def predict(problem: Any, config: Any, budget: Budget) -> float:
            return self.predict(problem, config, budget, dispatcher.profile)

        return self.tuner(op, dispatcher, calls, predict)

    def best_cell(self, found: Sequence[SmallMeasurement[Any, Any]]) -> Tuned[Any] | None:
        """The fastest, or the first (the model's choice) where it is as fast; None: none ran."""
        return sitting.best_cell(found, found[0].config, same_within=SAME_WITHIN)

    def tune(self, request: Request[Any], out: Path, raw_path: Path, *, fresh: bool) -> None:
        """Measure the cells that the table at `out` lacks (`fresh`: all), and write them there."""
        started: Sitting[Any, Any] = Sitting(request, CellFile(out, self.codec), raw_path, fresh)
        dispatcher = self.dispatcher(0)
        profile = dispatcher.profile

        def measure(tuner: SmallTuner[Any, Any], job: Job) -> Outcome[Any, Any]:
            wanted = self.listed(job.case.problem, job.place.budget, profile)
            found = tuner.measure(job.place, wanted, contended=request.contended)
            key = self.key(job.case.problem, job.place.budget)
            return Outcome(found, key, self.best_cell(found))

        def prepare(jobs: Sequence[Job]) -> None:
            if self.compiles:
                _compile(dict.fromkeys(job.case.problem for job in jobs), dispatcher)

        started.run(
            profile,
            lambda places, done: self.jobs_of(request, places, done),
            lambda case: self.tuner_of(case, dispatcher),
            measure,
            prepare,
        )


def _compile(problems: Iterable[Any], dispatcher: Any) -> None:
    """Side by side what the cells launch; the rest is loading."""
    from smkern.kernels.compile import compile_all
    from smkern.ops.small_dispatch import Compile

    kernels = dispatcher.kernels()
    new = dict.fromkeys(x for problem in problems for x in kernels.variants(problem))
    compile_all([Compile(x) for x in new], workers=len(os.sched_getaffinity(0)))
