"""`smkern autotune --op moe` and `--op grouped_gemm`: the experts' operators in partitions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from smkern.autotune import sitting
from smkern.autotune.moe_cases import QUICK_TOKENS, TOKENS, MoeCase, Op, calls_of, cases_of
from smkern.autotune.places import Place
from smkern.autotune.sitting import Outcome, Request, Sitting
from smkern.autotune.small import SmallMeasurement, SmallTuner
from smkern.bench.attention.cases import BUDGETS, QUICK_BUDGETS
from smkern.device import Budget, Profile
from smkern.tuning import grouped, grouped_table, moe, moe_table
from smkern.tuning.cells import CellFile, Tuned

__all__ = [
    "BUDGETS", "GROUPED", "MOE", "QUICK_BUDGETS", "QUICK_TOKENS", "TOKENS", "Family", "Request",
]  # fmt: skip

MAX_CANDIDATES = 12
SAME_WITHIN = 1.015
"""Times so close are one; the model's choice is kept then."""


class Job(NamedTuple):
    """One cell to measure."""

    case: MoeCase
    place: Place


class AnyBits(SmallTuner[Any, Any]):
    """Of candidates that may sum in other orders: each is held against the reference alone."""

    __slots__ = ()

    def _checked(
        self, problem: Any, place: Place, config: Any, first: Any, errors: dict[Any, str]
    ) -> Any:
        return super()._checked(problem, place, config, [], errors)


@dataclass(frozen=True, slots=True)
class Family:
    """A table's operators, as the command wants them: a module's `describe` and `tune`.

    Args:
        ops: What is measured.
        key: A cell's key, of a problem in a budget.
        codec: Of the table.
        candidates: Configurations of a problem in a budget on the profile's device.
        choose: The model's choice.
        predict: The model's time of one, us.
        dispatcher: Of a device.
        tuner: What measures a case.
    """

    ops: tuple[Op, ...]
    key: Callable[[Any, Budget], Any]
    codec: Any
    candidates: Callable[[Any, Budget, Profile], Sequence[Any]]
    choose: Callable[[Any, Budget, Profile], Any]
    predict: Callable[[Any, Any, Budget, Profile], float]
    dispatcher: Callable[[int], Any]
    tuner: type[SmallTuner[Any, Any]]

    def tuned_cases(self, tokens: Sequence[int] = TOKENS) -> list[MoeCase]:
        """Each operator of each model, a case for each number of tokens."""
        return cases_of(self.ops, tokens)

    def listed(self, problem: Any, budget: Budget, profile: Profile) -> tuple[Any, ...]:
        """The candidates of a cell, the model's choice first, then by its prediction.

        Where launches may overlap, the two first are also measured apart.
        """
        first = self.choose(problem, budget, profile)

        def order(config: Any) -> tuple[bool, float]:
            return config != first, self.predict(problem, config, budget, profile)

        found = sorted(self.candidates(problem, budget, profile), key=order)[:MAX_CANDIDATES]
        apart = [replace(x, pdl=False) for x in found[:2]] if budget.confined == "mask" else []
        return (*found, *apart)

    def describe(self, request: Request[MoeCase], profile: Profile) -> None:
        """Print what would be measured on the profile's GPU; needs none."""
        sitting.describe(
            request, profile, lambda case, budget: self.listed(case.problem, budget, profile)
        )

    def jobs_of(
        self, request: Request[MoeCase], places: Sequence[Place], done: Callable[[Any], bool]
    ) -> Iterator[Job]:
        """Cells that are not done, a case after the other, so that its operands are made once."""
        for case in request.cases:
            for place in places:
                if not done(self.key(case.problem, place.budget)):
                    yield Job(case, place)

    def tuner_of(self, case: MoeCase, dispatcher: Any, device: str = "cuda") -> Any:
        """What measures a case's cells."""
        op, calls = calls_of(case, device)

        def predict(problem: Any, config: Any, budget: Budget) -> float:
            return self.predict(problem, config, budget, dispatcher.profile)

        return self.tuner(op, dispatcher, calls, predict)

    def best_cell(self, found: Sequence[SmallMeasurement[Any, Any]]) -> Tuned[Any] | None:
        """The fastest, or the first (the model's choice) where it is as fast."""
        return sitting.best_cell(found, found[0].config, same_within=SAME_WITHIN)

    def tune(self, request: Request[MoeCase], out: Path, raw_path: Path, *, fresh: bool) -> None:
        """Measure the cells that the table at `out` lacks, and write them there."""
        started: Sitting[Any, Any] = Sitting(request, CellFile(out, self.codec), raw_path, fresh)
        dispatcher = self.dispatcher(0)
        profile = dispatcher.profile

        def measure(tuner: SmallTuner[Any, Any], job: Job) -> Outcome[Any, Any]:
            wanted = self.listed(job.case.problem, job.place.budget, profile)
            found = tuner.measure(job.place, wanted, contended=request.contended)
            key = self.key(job.case.problem, job.place.budget)
            return Outcome(found, key, self.best_cell(found))

        started.run(
            profile,
            lambda places, done: self.jobs_of(request, places, done),
            lambda case: self.tuner_of(case, dispatcher),
            measure,
            prepare=lambda jobs: _compile([job.case.problem for job in jobs], dispatcher),
        )


def _compile(problems: Sequence[Any], dispatcher: Any) -> None:
    """Side by side what the cells launch; the rest is loading."""
    from smkern.kernels.compile import compile_all
    from smkern.ops.small_dispatch import Compile

    kernels = dispatcher.kernels()
    new = dict.fromkeys(x for problem in problems for x in kernels.variants(problem))
    compile_all([Compile(x) for x in new], workers=len(os.sched_getaffinity(0)))


def _capability(profile: Profile) -> int:
    major, minor = profile.info.capability
    return 10 * major + minor


def _moe_dispatcher(index: int) -> Any:
    from smkern.ops.moe.dispatch import moe_dispatcher

    return moe_dispatcher(index)


def _grouped_dispatcher(index: int) -> Any:
    from smkern.ops.moe.grouped import grouped_dispatcher

    return grouped_dispatcher(index)


MOE = Family(
    ops=("topk_softmax", "moe_permute", "moe_unpermute"),
    key=moe_table.MoeKey.of,
    codec=moe_table.CODEC,
    candidates=lambda problem, budget, profile: moe.candidates(problem, budget),
    choose=moe.choose,
    predict=moe.predict_us,
    dispatcher=_moe_dispatcher,
    tuner=SmallTuner,
)
GROUPED = Family(
    ops=("gate_up", "down"),
    key=grouped_table.GroupedKey.of,
    codec=grouped_table.CODEC,
    candidates=lambda problem, budget, profile: grouped.candidates(
        problem, budget, _capability(profile)
    ),
    choose=lambda problem, budget, profile: grouped.choose(
        problem, budget, profile, _capability(profile)
    ),
    predict=grouped.predict_us,
    dispatcher=_grouped_dispatcher,
    tuner=AnyBits,
)
