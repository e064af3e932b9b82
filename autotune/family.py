"""How the tuner measures a family and chooses the winner of a cell."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from smkern.autotune.measure import Tuner, best_cell
from smkern.autotune.raw import Measurement
from smkern.device import Budget
from smkern.profile import Profile
from smkern.tuning.family import BucketFamily, Family

Tasks = Mapping[Hashable, Callable[[], object]]
"""Variant to the task that compiles it into this user's cache, in another process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredFamily:
    """A family and how it is measured. A case has a `name` and a `problem`.

    Args:
        tuned: The family's key, table and choice.
        listed: Gives so many configurations of a problem in a budget at most, the model's choice
            first, with their predicted times, us.
        dispatcher: The dispatcher of a device.
        tuner: Makes a tuner of cases with the same operands, for a dispatcher, on a device.
        tasks: What these configurations of a problem in a budget need compiled.
        best: The cell that measurements make, if any.
        operands: What cases must share to be measured on the same operands.
        most: Largest number of candidates of a cell.
    """

    tuned: Family[Any, Any]
    listed: Callable[[Any, Budget, Profile, int], Mapping[Any, float]]
    dispatcher: Callable[[int], Any]
    tuner: Callable[[Sequence[Any], Any, str], Tuner[Any, Any]]
    tasks: Callable[[Any, Budget, Sequence[Any], Any], Tasks]
    best: Callable[[Sequence[Measurement[Any, Any]]], Any] = best_cell
    operands: Callable[[Any], Hashable] = lambda case: case
    most: int = 12

    @property
    def name(self) -> str:
        """Name of the table's file."""
        return self.tuned.name

    def wanted(self, problem: Any, budget: Budget, profile: Profile) -> Mapping[Any, float]:
        """The candidates of a cell and their predicted times, us."""
        return self.listed(problem, budget, profile, self.most)


def ranked(
    family: BucketFamily[Any, Any],
) -> Callable[[Any, Budget, Profile, int], dict[Any, float]]:
    """`listed` of a family: the model's choice, then by its prediction.

    Where launches may overlap, the two first also come without (`pdl=False`).
    """

    def listed(problem: Any, budget: Budget, profile: Profile, most: int) -> dict[Any, float]:
        first = family.choose(problem, budget, profile)
        times = {
            x: family.predict_us(problem, x, budget, profile)
            for x in family.candidates(problem, budget, profile)
        }
        found = sorted(times, key=lambda x: (x != first, times[x]))[:most]
        if "pdl" in family.overlap and budget.confined == "mask":
            alone = (replace(x, pdl=False) for x in found[:2])
            found += [x for x in alone if x not in found]
        return {x: family.predict_us(problem, x, budget, profile) for x in found}

    return listed
