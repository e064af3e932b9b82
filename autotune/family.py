"""What the tuner knows of a table's operators: cells, candidates, how to measure and to choose."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from smkern.autotune.measure import Tuner, best_cell
from smkern.autotune.raw import Measurement
from smkern.device import Budget
from smkern.profile import Profile
from smkern.tuning.cells import CellFile

Tasks = Mapping[Hashable, Callable[[], object]]
"""What compiles a variant into this user's cache, in another process; by variant."""


def _same(x: Any) -> Any:
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Operators that share a table. A case has a `name`.

    Args:
        name: Of the table's file.
        file: The table at a path: `load(gpu)` and `merge(cells, meta)`.
        table: What `select` asks, of what was loaded.
        key: A cell's key, of a problem in a budget.
        listed: At most so many configurations of a problem in a budget, the model's choice first,
            and the times that the model predicts, us.
        select: What dispatch chooses by a table, or without one (None).
        dispatcher: Of a device.
        tuner: Of cases with the same operands, for a dispatcher, on a device.
        tasks: What these configurations of a problem in a budget need compiled.
        best: The cell that measurements make, if any.
        problem: Of a case.
        operands: What cases must share to be measured on the same operands.
        most: Candidates of a cell at most.
    """

    name: str
    file: Callable[[Path], Any]
    table: Callable[[Any], Any] = _same
    key: Callable[[Any, Budget], Any]
    listed: Callable[[Any, Budget, Profile, int], Mapping[Any, float]]
    select: Callable[[Any, Budget, Profile, Any], Any]
    dispatcher: Callable[[int], Any]
    tuner: Callable[[Sequence[Any], Any, str], Tuner[Any, Any]]
    tasks: Callable[[Any, Budget, Sequence[Any], Any], Tasks]
    best: Callable[[Sequence[Measurement[Any, Any]]], Any] = best_cell
    problem: Callable[[Any], Any] = attrgetter("problem")
    operands: Callable[[Any], Hashable] = _same
    most: int = 12

    def wanted(self, problem: Any, budget: Budget, profile: Profile) -> Mapping[Any, float]:
        """The candidates of a cell and their predicted times, us."""
        return self.listed(problem, budget, profile, self.most)


def ranked(
    candidates: Callable[[Any, Budget, Profile], Iterable[Any]],
    choose: Callable[[Any, Budget, Profile], Any],
    predict: Callable[[Any, Any, Budget, Profile], float],
    *,
    apart: bool = True,
) -> Callable[[Any, Budget, Profile, int], dict[Any, float]]:
    """A family's `listed`: the model's choice, then by its prediction.

    Args:
        candidates: Of a problem in a budget.
        choose: The model's choice.
        predict: Its time of a configuration, us.
        apart: Where launches may overlap, the two first also without (`pdl=False`).
    """

    def listed(problem: Any, budget: Budget, profile: Profile, most: int) -> dict[Any, float]:
        first, near = choose(problem, budget, profile), candidates(problem, budget, profile)
        times = {x: predict(problem, x, budget, profile) for x in near}
        found = sorted(times, key=lambda x: (x != first, times[x]))[:most]
        if apart and budget.confined == "mask":
            alone = (replace(x, pdl=False) for x in found[:2])
            found += [x for x in alone if x not in found]
        return {x: predict(problem, x, budget, profile) for x in found}

    return listed


def cell_file(codec: Any) -> Callable[[Path], CellFile[Any, Any]]:
    """A family's `file` by its codec."""
    return partial(CellFile, codec=codec)
