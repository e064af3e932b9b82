"""Cells measured one after another, while the kernels of those to come compile."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

import click

from smkern.autotune.compiling import Compiler
from smkern.autotune.family import MeasuredFamily
from smkern.autotune.raw import Measurement
from smkern.autotune.stop import Stop
from smkern.device import Budget
from smkern.measure.partitions import Place
from smkern.profile import Profile

CHUNKS = (8, 16, 32, 48)
"""Cells that are compiled, then measured together: few at first, so that measuring begins soon."""

Wanted = Mapping[Any, float]
Found = Sequence[Measurement[Any, Any]]


@dataclass(frozen=True, slots=True)
class Job:
    """One cell to measure."""

    family: MeasuredFamily
    case: Any
    place: Place

    @property
    def problem(self) -> Any:
        return self.case.problem

    @property
    def budget(self) -> Budget:
        return self.place.budget

    @property
    def key(self) -> Any:
        """The key of the cell in its table."""
        return self.family.tuned.key_of(self.problem, self.budget)

    def wanted(self, profile: Profile) -> Wanted:
        """The candidates and their predicted times, us."""
        return self.family.wanted(self.problem, self.budget, profile)


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How jobs are measured.

    Args:
        stop: Says when to end early.
        workers: Processes that compile.
        wanted: A job's configurations and their predicted times, us; none: it is left out.
        keep: Takes what was measured; False: nothing ran.
    """

    stop: Stop
    workers: int
    wanted: Callable[[Job, Profile], Wanted]
    keep: Callable[[Job, Found], bool]

    def run(self, jobs: Sequence[Job]) -> int:
        """Measure in this order, but cells of a chunk that share operands together.

        Returns:
            How many were left when it was time to stop.
        """
        left = len(jobs)
        with Compiler(self.workers) as compiler, _progress() as progress:
            task = progress.add_task("measuring", total=left)
            for chunk, compiled in self._ahead(compiler, _chunks(jobs)):
                if not compiler.wait(compiled, self.stop):
                    break
                for _ in self._measure(chunk):
                    left -= 1
                    progress.advance(task)
                if self.stop.why is not None:
                    break
            compiler.report()
        return left

    def _ahead(
        self, compiler: Compiler, chunks: Iterator[Sequence[Job]]
    ) -> Iterator[tuple[list[tuple[Job, Wanted]], set[Hashable]]]:
        """Each chunk with what it needs compiled, once the next one's compilation has begun."""

        def started(chunk: Sequence[Job]) -> tuple[list[tuple[Job, Wanted]], set[Hashable]]:
            listed, compiled = [], set()
            for job in chunk:
                dispatcher = job.family.dispatcher(0)
                wanted = self.wanted(job, dispatcher.profile)
                tasks = job.family.tasks(job.problem, job.budget, list(wanted), dispatcher)
                compiler.start(tasks)
                compiled |= set(tasks)
                listed.append((job, wanted))
            return listed, compiled

        before = None
        for chunk in chunks:
            now = started(chunk)
            if before is not None:
                yield before
            before = now
        if before is not None:
            yield before

    def _measure(self, chunk: Sequence[tuple[Job, Wanted]]) -> Iterator[Job]:
        """Each job as it is done, until it is time to stop."""
        import torch

        from smkern.measure.partitions import trim_memory

        groups: dict[tuple[str, Hashable], list[tuple[Job, Wanted]]] = {}
        for job, wanted in chunk:
            key = job.family.name, job.family.operands(job.case)
            groups.setdefault(key, []).append((job, wanted))
        for group in groups.values():
            try:
                yield from self._on_same_operands(group)
            except torch.cuda.OutOfMemoryError as error:
                text = str(error).splitlines()[0]
                click.echo(f"{group[0][0].case.name} is left out: {text}", err=True)
            trim_memory()

    def _on_same_operands(self, group: Sequence[tuple[Job, Wanted]]) -> Iterator[Job]:
        if self.stop.why is not None:
            return
        family = group[0][0].family
        cases = list(dict.fromkeys(job.case for job, _ in group))
        tuner = family.tuner(cases, family.dispatcher(0), "cuda")
        for job, wanted in group:
            if self.stop.why is not None:
                return
            if wanted:
                found = tuner.measure(job.problem, job.place, wanted)
                if not self.keep(job, found):
                    error = next(item.error for item in found if item.error is not None)
                    click.echo(f"{job.case.name} on {job.budget}: {error}", err=True)
            yield job


def _chunks(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    begin = 0
    for size in chain(CHUNKS, repeat(CHUNKS[-1])):
        if begin >= len(jobs):
            return
        yield jobs[begin : begin + size]
        begin += size


def _progress() -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    )
