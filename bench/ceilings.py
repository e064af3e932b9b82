"""`smkern bench ceilings`: what n SMs can read and compute, alone and beside a neighbour."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.ceiling_rows import PLACEMENTS, profile_of, summarize
from smkern.bench.cells import cell_head
from smkern.bench.contention import Load, time_beside, time_together
from smkern.bench.contexts import Green
from smkern.bench.dense import Dense
from smkern.bench.power import PowerMeter, power_meter
from smkern.bench.reader import Reader
from smkern.bench.reads import best_reader
from smkern.bench.results import Results
from smkern.bench.rows import Cell, has_cell
from smkern.bench.suite import BUDGETS_OPTION, Output, Run, show, suite_command
from smkern.device import device_info, gpu_folder
from smkern.measure.partitions import Partitions, Place
from smkern.measure.sm_clock import Clock, DeviceClock
from smkern.measure.timing import Timing
from smkern.profile import SHIPPED, Placement, Profile, save_profile

SHARES = (8, 16, 24, 32, 40, 48, 60)
"""Small sides; each is measured with its complement, on which the neighbour runs."""
READ_ONLY = (2, 4, 12, 20, 28)
"""Where bandwidth bends: reads alone."""
QUICK_SHARES = (8, 16, 32, 48)
"""In spread partitions alone: a profile in half a minute, less exact between these."""
WINDOW_US = {"read": 40_000.0, "read_l2": 40_000.0, "dense": 200_000.0}
"""How long to keep the SMs busy: it takes some 50 ms until power limits the clock."""
CLOCK_READINGS = 4
OURS = "smkern"
READER = "reader:"
"""Prefix of the readers' providers."""
SMALLEST_DENSE = 8
"""Below it a product takes 30 ms."""


def counts(total: int, shares: Sequence[int]) -> list[int]:
    """Each share and its complement, in order."""
    sides = {n for share in shares for n in (share, total - share) if 0 < share < total}
    return sorted(sides)


@dataclass(frozen=True, slots=True)
class Task:
    """Work at a place, alone or beside a neighbour; its cells come together.

    Attributes:
        place: Where.
        other: Its complement, where products run meanwhile; None: nothing does.
        dense: Whether products, and reads of L2, are measured too.
    """

    place: Place
    other: Place | None = None
    dense: bool = True


@dataclass(slots=True)
class Ceilings:
    """Measures tasks; a provider that fails is named in `errors`."""

    reader: Reader
    dense: Dense
    meter: PowerMeter
    errors: dict[str, str]
    clock_on: Callable[[Any], Clock] = DeviceClock
    sm_mhz: float | None = None
    watts: float | None = None

    def is_measured(self, task: Task, cells: Sequence[Cell]) -> bool:
        """Whether the task's last reads are there."""
        where = "read_l2" if task.dense else "read", task.place.num_sms, task.place.placement
        there = [x for x in cells if (x["op"], x["num_sms"], x["placement"]) == where]
        return has_cell(there, self._reader, {"beside": "dense" if task.other else None})

    def measure(self, task: Task) -> list[Cell]:
        if task.other is not None:
            return self.beside(task.place, task.other)
        return self.alone(task.place, dense=task.dense)

    def alone(self, place: Place, *, dense: bool) -> list[Cell]:
        """Reads, and products where asked, with nothing beside them.

        In a default partition cuBLAS runs, so ours need not stand in for it.
        """
        read, read_l2 = self._reads(place)
        cells = [self._run(place, "read", read)]
        if not dense:
            return cells
        cells.append(self._run(place, "read_l2", read_l2))
        errors: dict[str, str] = {}
        working = self.dense.working(place, errors)
        for provider, call in islice(working, 1 if place.placement == "default" else None):
            cells.append(self._run(place, "dense", Load.of(call, place.stream), provider))
        for provider, message in errors.items():
            self.errors[f"{provider} on {place.num_sms} SMs ({place.placement})"] = message
        return cells

    def beside(self, place: Place, other: Place) -> list[Cell]:
        """Reads at `place` while our products run at `other`, its complement, as prompts' do."""
        call = dict(self.dense.working(other, {}))[OURS]
        read, read_l2 = self._reads(place)
        found = time_beside(
            {"read": read, "read_l2": read_l2},
            Load.of(call, other.stream),
            self.clock_on(place.stream),
            while_busy=self._watch,
        )
        self.sm_mhz = found.sm_mhz
        cells = [self._cell(kind, place, x, beside=True) for kind, x in found.probes.items()]
        if found.neighbour is not None:
            cells.append(self._cell("dense", other, found.neighbour, OURS, beside=True))
        return cells

    def _reads(self, place: Place) -> tuple[Load, Load]:
        """Of memory and of L2."""
        num_sms, stream, reader = place.num_sms, place.stream, self.reader
        return (
            Load.of(lambda i: reader.launch(num_sms, stream.cuda_stream), stream),
            Load.of(lambda i: reader.launch_l2(num_sms, stream.cuda_stream), stream),
        )

    def _run(self, place: Place, kind: str, load: Load, dense_by: str = "") -> Cell:
        timings = time_together({kind: load}, at_least_us=WINDOW_US[kind], while_busy=self._watch)
        return self._cell(kind, place, timings[kind], dense_by)

    @property
    def _reader(self) -> str:
        return READER + self.reader.shape.name

    def _watch(self) -> None:
        """Read clock and power a few times; `sm_mhz` and `watts` are the means."""
        readings = []
        for _ in range(CLOCK_READINGS):
            self.meter()
            readings.append(self.meter.last)
            time.sleep(2e-3)
        self.sm_mhz, self.watts = (_mean(values) for values in zip(*readings, strict=True))

    def _cell(
        self, kind: str, place: Place, timing: Timing, dense_by: str = "", *, beside: bool = False
    ) -> Cell:
        us = fmean(timing.us_all)
        if kind == "dense":
            case, provider, neighbour = self.dense.case, dense_by, "read"
            rates = {"tflops": round(self.dense.tflops(us), 2), "tbps": None}
        else:
            size = self.reader.num_bytes if kind == "read" else self.reader.l2_bytes(place.num_sms)
            case = {"bytes": size}
            provider, neighbour = self._reader, "dense"
            rates = {"tflops": None, "tbps": round(size / us / 1e6, 4)}
        about = case | {"beside": neighbour if beside else None}
        return cell_head(kind, about, place, provider) | {
            "us": round(us, 2),
            **rates,
            "fraction_of_ceiling": None,
            "sm_mhz": self.sm_mhz,
            "watts": self.watts,
            "noise": round(timing.noise, 4),
        }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 1) if known else None


def sides(
    partitions: Partitions, total: int, shares: Sequence[int]
) -> Iterator[tuple[Place, Place]]:
    """(a place, its complement) of each count and placement that has both."""
    for placement in PLACEMENTS:
        for n in counts(total, shares):
            place, other = partitions.at(n, placement), partitions.at(total - n, placement)
            if place is not None and other is not None:
                yield place, other


def tasks(
    partitions: Partitions, total: int, shares: Sequence[int], read_only: Sequence[int]
) -> Iterator[Task]:
    """The whole device first; reads beside products wherever these are not too slow."""
    yield Task(partitions.full)
    for place, other in sides(partitions, total, shares):
        yield Task(place, dense=place.num_sms >= SMALLEST_DENSE)
        if other.num_sms >= SMALLEST_DENSE:
            yield Task(place, other)
    for n in read_only:
        if (found := partitions.at(n)) is not None:
            yield Task(found, dense=False)


def run(
    shares: Sequence[int],
    read_only: Sequence[int],
    results: Results,
    output: Output,
    placements: tuple[Placement, ...] = PLACEMENTS,
) -> None:
    """Measure what `results` lacks."""
    info = device_info()
    total = info.num_sms
    extra = [n for n in read_only if info.min_sms <= n < total]
    budgets = {n for n in counts(total, shares) if n >= info.min_sms} | set(extra)
    with Partitions(budgets, placements=placements) as partitions, Progress() as progress:
        small = [partitions.at(n) for n in sorted(budgets) if n <= 32]
        reader = best_reader(
            (Green(at.num_sms, at.stream) for at in (*small, partitions.full) if at is not None),
            among={cell["provider"].removeprefix(READER) for cell in results.cells},
        )
        run = Run(results, output, summarize, progress)
        ceilings = Ceilings(reader, Dense(), power_meter(), run.errors)
        every = tasks(partitions, total, shares, extra)
        left = [task for task in every if not ceilings.is_measured(task, results.cells)]
        run.through(left, ceilings.measure, len(left))


def ship_profile(profile: Profile, folder: Path = SHIPPED) -> Path:
    """Write a profile beside the package's own, under the GPU's folder name."""
    path = save_profile(profile, folder / f"{gpu_folder(profile.info.name)}.json")
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    return path


@suite_command(
    "ceilings",
    BUDGETS_OPTION,
    click.option("--save", is_flag=True, help="Keep the curves as your profile of this GPU."),
    click.option("--ship", is_flag=True, help="Write them to the package's own profiles."),
)
def command(output: Output, *, budgets: Any, save: bool, ship: bool) -> None:
    """Time reads and dense products on n SMs, alone and beside each other.

    --budgets names small sides; each is measured with its complement.
    """
    quick = output.quick
    if (budgets and (save or ship)) or (quick and ship):
        raise click.UsageError(
            "a profile needs the whole suite: drop --budgets, and --quick of one to ship"
        )
    results = output.open()
    shares = budgets or (QUICK_SHARES if quick else SHARES)
    placements: tuple[Placement, ...] = ("spread",) if quick else PLACEMENTS
    run(shares, () if quick or budgets else READ_ONLY, results, output, placements)
    profile = profile_of(results.cells, device_info(), results.meta)
    if save:
        click.echo(f"profile saved: {save_profile(profile)}")
    if ship:
        click.echo(f"profile to ship: {ship_profile(profile)}")
    show(results, output.path)
