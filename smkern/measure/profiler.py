"""Times the cells of a profile, one after another, as long as there is time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from smkern.device import Budget
from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.latency.profile_file import Measured, ProfileFile
from smkern.latency.sample import Sample
from smkern.measure.busy import Steady, Turns, measure
from smkern.measure.compiling import Forwards, compile_forwards
from smkern.measure.launches import ModelLaunches
from smkern.measure.partitions import trim_memory
from smkern.measure.profile_plan import Cell
from smkern.measure.sm_clock import Clock
from smkern.models import ModelConfig
from smkern.models.step import batch_bucket
from smkern.runtime.device import Work
from smkern.runtime.place import Place

WHOLE_US = 60_000.0
"""A prompt that takes no longer is timed whole, of others as many layers as take `PART_US`."""
PART_US = 40_000.0
TRIED_LAYERS = 2
BY_HOST = 3.0
"""Prompts that take less than so many times their launching are timed as graphs: a host launched
the same layers in 5 ms and seconds later in 9."""

BudgetOf = Callable[[Place], Budget]
"""The budget of a place."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a cell is watched.

    Attributes:
        settle_s: Seconds before what counts: the clock falls with the power that is drawn.
        seconds: Seconds that count, at least.
        turns: Turns that count, at least.
    """

    settle_s: float
    seconds: float
    turns: int


DECODE = Patience(0.05, 0.04, 6)
PREFILL = Patience(0.2, 0.1, 3)
MIXED = Patience(0.2, 0.1, 4)
PAIR = Patience(0.8, 0.2, 4)
"""Watched after 0.3 s, single pairs took up to 14% longer than steady rows of the same kernels."""


@dataclass(slots=True)
class Profiler:
    """Times cells and writes them down.

    Attributes:
        launches: What is launched.
        file: Where lines are added.
        clock: Reads the SMs' clock in the middle of a cell; None: nobody does.
        patience: Scale of all waiting; 1 on a GPU.
        skipped: Cells that could not be run, and why.
    """

    launches: ModelLaunches
    file: ProfileFile
    clock: Clock | None = None
    patience: float = 1.0
    skipped: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        cells: Sequence[Cell],
        seconds: float,
        told: Callable[[int, float], None] = lambda count, spent: None,
    ) -> int:
        """Time cells until all are timed or the time is over.

        Args:
            cells: The cells, in order.
            seconds: Time for all.
            told: Called after each cell with how many are timed and the seconds spent.

        Returns:
            How many cells were timed.
        """
        count, began = 0, time.monotonic()
        for cell in cells:
            if time.monotonic() - began > seconds:
                break
            try:
                self.file.add(self._with_room(cell))
            except (torch.OutOfMemoryError, ArgumentError) as error:
                self.skipped[cell.name] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            count += 1
            told(count, time.monotonic() - began)
        return count

    def _with_room(self, cell: Cell) -> list[Measured]:
        """Time one cell; where memory lacks, again without the graphs of cells before."""
        with suppress(torch.OutOfMemoryError):
            return self.cell(cell)
        self.launches.close()
        trim_memory(0)
        return self.cell(cell)

    def cell(self, cell: Cell) -> list[Measured]:
        """Time one cell: a line a lane."""
        lanes, sizes, patience = self._lanes(cell)
        steady = self._measure(lanes, patience)
        about = {} if self.clock is None else {"mhz": self.clock.mhz() or 0.0}
        found = []
        for index, (lane, size) in enumerate(zip(lanes, sizes, strict=True)):
            other = 1 - index if len(lanes) == 2 else None
            sample = Sample(
                size,
                lane.place.num_sms,
                steady[index].us,
                None if other is None else sizes[other],
                0 if other is None else lanes[other].place.num_sms,
            )
            noted = {"worst_us": steady[index].worst_us, "turns": float(steady[index].turns)}
            found.append(Measured(cell.name, sample, cell.held_out, noted | about))
        return found

    def _lanes(self, cell: Cell) -> tuple[list[Turns], list[Size], Patience]:
        launches, device = self.launches, self.launches.device
        if cell.mixed:
            work = launches.mixed(cell.chunks, cell.lengths)
            mixed = Turns("decode", Place.whole(device.num_sms), [work])
            self._once(mixed)
            return [mixed], [_known(work)], MIXED
        lanes, sizes = [], []
        if cell.lengths:
            place = Place.of("decode", cell.rung, device.num_sms)
            launches.capture(place, cell.lengths)
            work = launches.decode(cell.lengths)
            lanes.append(Turns("decode", place, [work], depth=3))
            sizes.append(_known(work))
        if cell.chunks:
            place = Place.of("prefill", cell.rung, device.num_sms)
            works = self._prompts(cell.chunks, place)
            turns = Turns("prefill", place, works, depth=3)
            self._once(turns)
            lanes.append(turns)
            num_layers, last = launches.config.num_layers, _known(works[-1])
            count = sum(_known(work).layers for work in works)
            sizes.append(Size(cell.chunks, count, num_layers, last.head))
        return lanes, sizes, PAIR if len(lanes) == 2 else PREFILL if cell.chunks else DECODE

    def _prompts(self, chunks: Sequence[Chunk], place: Place) -> list[Work]:
        """A turn of prompts: all layers and the head, or some layers of long ones."""
        num_layers = self.launches.config.num_layers
        tried = min(TRIED_LAYERS, num_layers)
        turns = Turns("prefill", place, self.launches.prompts(chunks, tried))
        self._once(turns)  # loads what is new
        us, launching_us = self._once(turns)
        a_layer = us / tried
        if a_layer * num_layers > WHOLE_US:
            some = min(max(2, round(PART_US / a_layer)), num_layers)
            return self.launches.prompts(chunks, some)
        if us < BY_HOST * launching_us:
            return self.launches.prompt_graph(chunks, place)
        return self.launches.prompts(chunks)

    def _once(self, turns: Turns) -> tuple[float, float]:
        """Run a lane's works once, and wait; microseconds from begin to end, and of launching."""
        device = self.launches.device
        began = device.now_us()
        for work in turns.works:
            device.launch(turns.lane, turns.place, work)
        launching_us = device.now_us() - began
        device.synchronize()
        return device.now_us() - began, launching_us

    def _measure(self, lanes: Sequence[Turns], patience: Patience) -> list[Steady]:
        return measure(
            self.launches.device,
            lanes,
            settle_s=self.patience * patience.settle_s,
            seconds=self.patience * patience.seconds,
            turns=patience.turns,
            while_busy=(lambda: None) if self.clock is None else self.clock.read,
        )

    def warm(self, cells: Sequence[Cell]) -> None:
        """Run each kind of launch once at the device's ends, so that what compiles then is not in
        the time for measuring."""
        seen: set[tuple[bool, bool, bool, bool]] = set()
        for cell in cells:
            cached = any(chunk.cached for chunk in cell.chunks)
            kind = (cell.mixed, bool(cell.lengths), bool(cell.chunks), cached)
            if kind not in seen:
                seen.add(kind)
                for lane in self._lanes(cell)[0]:
                    self._once(lane)


def compile_cells(
    config: ModelConfig, cells: Iterable[Cell], max_running: int, budget: BudgetOf
) -> int:
    """Compile side by side the GEMMs of all cells; how many variants."""
    return compile_forwards(config, list(_forwards(cells, max_running, budget)))


def _forwards(cells: Iterable[Cell], max_running: int, budget: BudgetOf) -> Iterator[Forwards]:
    total = budget(Place.whole(0)).num_sms
    found: dict[tuple[int, int, Place], None] = {}
    for cell in cells:
        rows, new = len(cell.lengths), sum(chunk.new for chunk in cell.chunks)
        if cell.mixed:
            key = new + rows, rows + len(cell.chunks), Place.whole(total)
            found[key] = None
            continue
        if rows:
            bucket = batch_bucket(rows, max_running)
            found[bucket, bucket, Place.of("decode", cell.rung, total)] = None
        if new:
            found[new, len(cell.chunks), Place.of("prefill", cell.rung, total)] = None
    for tokens, requests, place in found:
        yield [(tokens, requests)], [budget(place)]


def _known(work: Work) -> Size:
    assert work.size is not None
    return work.size
