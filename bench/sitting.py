"""A sitting of a suite whose groups share a case's operands: measured, saved, gone on with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rich.progress import Progress

from smkern.bench.gemm import Deadline
from smkern.bench.results import Results
from smkern.measure.partitions import trim_memory

Cell = dict[str, Any]
SAVE_EVERY_S = 5.0


class Group(Protocol):
    """One case, which has a name, in one budget."""

    @property
    def case(self) -> Any: ...
    @property
    def num_sms(self) -> int: ...


G = TypeVar("G", bound=Group)


def pending(groups: Sequence[G], results: Results) -> list[G]:
    """The groups of which the file has no cell."""
    done = {(cell["case"]["name"], cell["group_sms"]) for cell in results.cells}
    return [group for group in groups if (group.case.name, group.num_sms) not in done]


@dataclass(slots=True)
class Sitting(Generic[G]):
    """One run of a suite; the file is written every few seconds and at the end.

    Args:
        measure: the cells of a group, by its case's operands and peers.
        operands: a case's operands and peers; they are dropped before the next case's are made.
        summarize: the file's summary, of its cells.
    """

    measure: Callable[[G, Any, Any], list[Cell]]
    operands: Callable[[Any], tuple[Any, Any]]
    summarize: Callable[[list[Cell]], dict[str, Any]]
    results: Results
    path: Path
    deadline: Deadline
    progress: Progress
    _saved_s: float = 0.0

    def run(self, groups: Sequence[G]) -> int:
        """Measure the groups that are pending; how many are left."""
        left = pending(groups, self.results)
        task = self.progress.add_task("measure", total=len(left))
        try:
            for group, operands, peers in self._with_operands(left):
                if self.deadline.passed:
                    break
                for cell in self.measure(group, operands, peers):
                    self.results.add(cell)
                self.progress.advance(task)
                if time.monotonic() - self._saved_s > SAVE_EVERY_S:
                    self.save()
        finally:
            self.save()
        return len(pending(groups, self.results))

    def save(self) -> None:
        self.results.summary = self.summarize(self.results.cells)
        self.results.save(self.path)
        self._saved_s = time.monotonic()

    def _with_operands(self, groups: Sequence[G]) -> Iterator[tuple[G, Any, Any]]:
        for case, members in groupby(groups, key=lambda group: group.case):
            operands, peers = self.operands(case)
            for group in members:
                yield group, operands, peers
            del operands, peers
            trim_memory(0)
