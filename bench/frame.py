"""Suites of cases in budgets: providers checked once, timed in the same rounds, a cell each."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Generic

import torch
from rich.progress import Progress

from smkern.bench.cases import C, Group, Measured
from smkern.bench.cells import ceiling_of, cell_head, failed_cell, measured_cell
from smkern.bench.power import PowerMeter, power_meter
from smkern.bench.results import Results
from smkern.bench.rows import Cell
from smkern.bench.suite import Output, Run
from smkern.measure.partitions import Partitions, Place, Placement, trim_memory
from smkern.measure.timing import Call, Case, Timing, first_line, ratio, time_within, try_eagerly
from smkern.profile import Profile, load_profile

Peer = tuple[str, Mapping[str, Any], Callable[[], Call]]
"""A name, what its cells say, and what prepares its call."""


@dataclass(frozen=True, slots=True)
class Provider:
    """Who computes a case, at a place. `make` prepares its call.

    `about` goes into its cell, and what `tell` says once it ran; `case` stands there instead of
    the case's own.
    """

    name: str
    place: Place
    make: Callable[[], Call]
    about: Mapping[str, Any] = field(default_factory=dict)
    tell: Callable[[], Mapping[str, Any]] = dict
    case: Mapping[str, Any] | None = None

    @property
    def key(self) -> str:
        place = f"{self.place.placement or 'full'}:{self.place.num_sms}"
        return f"{self.name}@{place}:{self.about.get('layout', '')}"

    @property
    def is_ours(self) -> bool:
        return is_ours(self.name)


def is_ours(provider: str) -> bool:
    """smkern as dispatched, or one of its kernels."""
    return provider.partition(":")[0] == "smkern"


class Bench(ABC, Generic[C]):
    """Cases on their operands: who computes them, and whether what comes out is right."""

    budget_us: float
    """Device time that the rounds of one group may take."""
    others: Sequence[Peer] = ()
    """Who else computes a case, the same in every place."""

    def ours(self, case: C, place: Place) -> Iterable[Provider]:
        """Our providers, in the spread partition."""
        return ()

    def peers(self, case: C, place: Place) -> Iterable[Provider]:
        """The others, in the spread and in the default partition."""
        return [Provider(name, place, make, about) for name, about, make in self.others]

    @abstractmethod
    def reset(self, case: C) -> None:
        """Undo what a call changes, and poison what it must write."""

    @abstractmethod
    def complaint(self, case: C, provider: Provider, result: Any) -> str | None:
        """What is wrong after one call, which returned `result`; None: it is right."""

    def providers(self, group: Group[C], partitions: Partitions) -> list[Provider]:
        place = partitions.at(group.num_sms)
        if place is None:
            return []
        places = dict.fromkeys((place, partitions.at(group.num_sms, "default")))
        peers = (p for at in places if at is not None for p in self.peers(group.case, at))
        return [*self.ours(group.case, place), *peers]

    def compare(
        self, provider: Provider, cells: Mapping[str, Cell], timings: Mapping[str, Timing]
    ) -> Cell:
        """What a provider's cell says of the others', by their keys."""
        return compared(timings[provider.key], cells, timings) if provider.is_ours else {}

    def to_repeat(
        self, providers: list[Provider], cells: list[Cell], is_losing: Callable[[Cell], bool]
    ) -> list[Provider]:
        """Who is measured a second time: all, where one of our cells lost."""
        return providers if any(map(is_losing, cells)) else []

    def more(self, group: Group[C], partitions: Partitions, cells: list[Cell]) -> Iterable[Cell]:
        """Cells beside the providers'."""
        return ()


@dataclass(slots=True)
class Rounds:
    """Measures groups.

    Args:
        meter: reads clock and power while the device is busy.
    """

    partitions: Partitions
    profile: Profile
    meter: PowerMeter

    def measure(
        self, bench: Bench[C], group: Group[C], is_losing: Callable[[Cell], bool] | None
    ) -> list[Cell]:
        """The cells of a group; a provider that cannot run has an `error`.

        A group that loses is measured a second time; both results stand.
        """
        providers = bench.providers(group, self.partitions)
        cells = self.round(bench, group, providers)
        if is_losing is not None:
            again = bench.to_repeat(providers, cells, is_losing)
            cells = note_again(cells, self.round(bench, group, again)) if again else cells
        return [*cells, *bench.more(group, self.partitions, cells)]

    def round(self, bench: Bench[C], group: Group[C], providers: Sequence[Provider]) -> list[Cell]:
        """A cell a provider and place, of its best layout."""
        errors: dict[str, str] = {}
        cases: dict[str, Case] = {}
        for index, provider in enumerate(providers):
            call = checked(bench, group.case, provider, errors)
            if call is not None:
                cases[provider.key] = Case(call, provider.place.stream, 1, index)
        timings = time_within(bench.budget_us, cases, while_busy=self.meter, errors=errors)
        cells = {}
        for one in providers:
            head = cell_head(group.case.op, one.case or group.case.about, one.place, one.name)
            figures = self._figures(group.case, one, timings.get(one.key), errors.get(one.key))
            cells[one.key] = head | {"group_sms": group.num_sms} | dict(one.about) | figures
        best = best_of_layouts(cells)
        kept = {key: timings[key] for key in best if key in timings}
        for one in providers:
            if one.key in kept:
                best[one.key] |= bench.compare(one, best, kept)
        return list(best.values())

    def _figures(
        self, case: Measured, provider: Provider, timing: Timing | None, error: str | None
    ) -> Cell:
        """What a cell says after its head: the figures and what the provider tells, or why not."""
        if timing is None:
            return failed_cell(error or "not measured")
        place = provider.place
        ceiling = ceiling_of(self.profile, place.budget, place.placement)
        clock, watts = self.meter.last
        cell = measured_cell(case, timing, ceiling) | {"sm_mhz": clock, "watts": watts}
        return cell | dict(provider.tell())


def checked(bench: Bench[C], case: C, provider: Provider, errors: dict[str, str]) -> Call | None:
    """The provider's call after one eager run with the right result, else None and its error.

    Args:
        errors: gets the error's first line by the provider's key.
    """
    results: list[Any] = []
    bench.reset(case)
    torch.cuda.synchronize()
    try:
        call = provider.make()
        message = try_eagerly(lambda i: results.append(call(i)), provider.place.stream)
    except Exception as error:  # noqa: BLE001  whatever a peer raises is its result
        message = first_line(error)
    if message is None:
        message = bench.complaint(case, provider, results[0])
        if message is None:
            return call
    errors[provider.key] = message
    return None


def wrong_result(relative: float, tolerance: float) -> str | None:
    """What is wrong with a result of this relative error, which may be NaN; None: nothing."""
    if relative < tolerance:
        return None
    return f"wrong result: |out - torch| / |torch| is {relative:.3g}, at most {tolerance} allowed"


def _where(cell: Cell) -> tuple[str, str | None, int]:
    return cell["provider"], cell["placement"], cell["num_sms"]


def best_of_layouts(cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """One cell a provider and place: the fastest of its layouts, or an error if all failed."""
    chosen: dict[tuple[str, str | None, int], str] = {}
    for key, cell in cells.items():
        rival = chosen.get(_where(cell))
        if rival is None or _us(cell) < _us(cells[rival]):
            chosen[_where(cell)] = key
    return {key: cells[key] for key in chosen.values()}


def _us(cell: Cell) -> float:
    return cell.get("us") or float("inf")


def compared(
    timing: Timing, cells: Mapping[str, Cell], timings: Mapping[str, Timing]
) -> dict[str, Any]:
    """What goes into our cell: each peer's time over ours, in the peer's better place.

    `vs` provider to ratio; `vs_flashinfer` and `best_flashinfer` the fastest of FlashInfer's ways;
    `vs_best` and `best_peer` the fastest of all.
    """
    fastest: dict[str, Timing] = {}
    for key, peer in timings.items():
        provider = cells[key]["provider"]
        rival = fastest.get(provider)
        if not is_ours(provider) and (rival is None or peer.us_median < rival.us_median):
            fastest[provider] = peer
    ratios = {name: round(ratio(peer, timing), 4) for name, peer in fastest.items()}
    theirs = {name: value for name, value in ratios.items() if name.startswith("flashinfer:")}
    found: dict[str, Any] = {"vs": ratios} if ratios else {}
    for label, key, members in (
        ("vs_best", "best_peer", ratios),
        ("vs_flashinfer", "best_flashinfer", theirs),
    ):
        if members:
            provider = min(members, key=members.__getitem__)
            found |= {label: members[provider], key: provider}
    return found


AGAIN = ("us", "vs", "vs_flashinfer", "vs_best", "vs_cublas")


def note_again(first: Iterable[Cell], second: Iterable[Cell]) -> list[Cell]:
    """The first cells with the second's time and ratios beside theirs, under `*_again`."""
    again = {_where(cell): cell for cell in second}
    noted = []
    for cell in first:
        twin = again.get(_where(cell), {})
        noted.append(cell | {f"{name}_again": twin[name] for name in AGAIN if twin.get(name)})
    return noted


@dataclass(frozen=True, slots=True)
class GroupSuite(Generic[C]):
    """What a suite of groups adds to the frame.

    Args:
        build: operands and providers of cases that share them, which are dropped before the next.
        summarize: the file's summary, of its cells.
        is_losing: whether a cell is one of ours, slower than the peer that it is held against.
        shares: what cases have in common that share their operands.
        prepare: compiles what the groups will launch.
        placements: the ladders to make.
        counts: the cells by which a group counts as measured.
    """

    build: Callable[[Sequence[C]], Bench[C]]
    summarize: Callable[[Sequence[Cell]], dict[str, Any]]
    is_losing: Callable[[Cell], bool] = lambda cell: False
    shares: Callable[[C], Any] = lambda case: case
    prepare: Callable[[Sequence[Group[C]], Partitions, Progress], Any] = lambda *_: None
    placements: tuple[Placement, ...] = ("spread", "default")
    counts: Callable[[Cell], bool] = lambda cell: True

    def pending(self, groups: Sequence[Group[C]], results: Results, *, again: bool) -> list[Group]:
        """The groups of which the file has no cell, or with `again` one that lost only once."""
        done: dict[tuple[str, int], bool] = {}
        for cell in filter(self.counts, results.cells):
            key = json.dumps(cell["case"], sort_keys=True), cell["group_sms"]
            lost_once = again and self.is_losing(cell) and "us_again" not in cell
            done[key] = done.get(key, True) and not lost_once
        return [
            group
            for group in groups
            if not done.get((json.dumps(group.case.about, sort_keys=True), group.num_sms))
        ]

    def run(
        self,
        groups: Sequence[Group[C]],
        results: Results,
        output: Output,
        *,
        again: bool,
        budgets: Iterable[int] | None = None,
    ) -> int:
        """Measure what `results` lacks; how many groups are left.

        Args:
            budgets: of the partitions to make; the groups' own by default.
        """
        left = self.pending(groups, results, again=again)
        wanted = budgets or {group.num_sms for group in groups}
        with Partitions(wanted, self.placements) as partitions, Progress() as progress:
            rounds = Rounds(partitions, load_profile(), power_meter())
            self.prepare(left, partitions, progress)
            is_losing = self.is_losing if again else None

            def measure(item: tuple[Bench[C], Group[C]]) -> list[Cell]:
                return rounds.measure(*item, is_losing)

            run = Run(results, output, self.summarize, progress)
            run.through(self._on_operands(left), measure, len(left))
        return len(self.pending(groups, results, again=again))

    def _on_operands(self, groups: Sequence[Group[C]]) -> Iterator[tuple[Bench[C], Group[C]]]:
        for _, found in groupby(groups, key=lambda group: self.shares(group.case)):
            members = list(found)
            bench = self.build([group.case for group in members])
            for group in members:
                yield bench, group
                trim_memory()
            del bench
            trim_memory(0)
