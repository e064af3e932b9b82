"""Cells that a run measures several times, all sides by turns: one cell of all its rounds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from smkern.bench.results import cell_key
from smkern.bench.runtime.cases import Cell
from smkern.bench.runtime.figures import tbt_of

STEPS = "steps_ms"
DIGITS = 6


def combined(cells: Sequence[Cell], failed: Mapping[int, str] | None = None) -> Cell:
    """One cell of a cell's rounds; a single one stays as it is.

    TBT comes from the steps of all rounds, every other figure is the median of the rounds; what is
    no figure is the last round's.

    Args:
        cells: One per round, in order.
        failed: Rounds that measured nothing, and why.
    """
    found = dict(cells[-1])
    if len(cells) > 1:
        found = {name: _middle([cell.get(name) for cell in cells]) for name in found}
        if all(STEPS in cell for cell in cells):
            found |= tbt_of([ms for cell in cells for ms in cell[STEPS]])
        found["rounds"] = [cell.get("value") for cell in cells]
    if failed:
        found["failed_rounds"] = {str(number): failed[number] for number in sorted(failed)}
    return found


def _middle(values: Sequence[Any]) -> Any:
    """The median of figures, or of each of several by name; of all else the last."""
    last, known = values[-1], [value for value in values if value is not None]
    if known and all(isinstance(value, int | float) for value in known):
        # a count, or a setting, stays the integer that it is where all rounds agree
        same = len(set(known)) == 1
        return known[0] if same else round(statistics.median(known), DIGITS)
    if isinstance(last, dict) and all(isinstance(value, dict) for value in values):
        return {name: _middle([value.get(name) for value in values]) for name in last}
    return last


@dataclass(slots=True)
class Rounds:
    """What each round of a run measured. A task is named by the key of its first cell.

    Attributes:
        number: Number of the current round, from 1.
    """

    number: int = 1
    _cells: dict[str, dict[int, Cell]] = field(default_factory=dict)
    _keys: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _failed: dict[str, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    _whole: set[str] = field(default_factory=set)

    def has(self, key: str) -> bool:
        """Whether a round has measured this cell."""
        return key in self._cells

    def now(self) -> list[Cell]:
        """The cells of the current round."""
        return [by[self.number] for by in self._cells.values() if self.number in by]

    def add(self, task: str, cell: Cell) -> Cell:
        """A task's cell of this round, combined with those of earlier rounds."""
        key = cell_key(cell)
        self._keys[task].add(key)
        self._cells.setdefault(key, {})[self.number] = cell
        return self._combined(key)

    def end(self, task: str) -> None:
        """The task ran to its end in this round."""
        self._whole.add(task)

    def fail(self, task: str, message: str) -> list[Cell]:
        """The task failed in this round: its cells of earlier rounds, which say so now."""
        self._failed[task][self.number] = message
        missed = (key for key in self._cells if key in self._keys[task])
        return [self._combined(key) for key in missed if self.number not in self._cells[key]]

    def is_whole(self, task: str) -> bool:
        """Whether some round ran the task to its end."""
        return task in self._whole

    def _combined(self, key: str) -> Cell:
        by_round = self._cells[key]
        failed = {
            number: message
            for task, keys in self._keys.items()
            if key in keys
            for number, message in self._failed[task].items()
            if number not in by_round
        }
        return combined([by_round[number] for number in sorted(by_round)], failed)
