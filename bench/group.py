"""One case in one budget: every provider checked once, then timed in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from smkern.bench.cases import Group
from smkern.bench.cells import ceiling_of, failed_cell, measured_cell
from smkern.bench.check import complaint
from smkern.bench.power import PowerMeter
from smkern.bench.providers import (
    OUR_BACKENDS,
    Misled,
    cublas_call,
    describe,
    dispatched_call,
    problem_of,
)
from smkern.errors import SmkernError
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Partitions, Place
from smkern.measure.timing import (
    Call,
    Case,
    Timing,
    calls_for,
    ratio,
    time_within,
)
from smkern.ops.gemm.dispatch import Dispatcher

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """A provider on a stream. `make` prepares its call; `about` goes into its cell as it is."""

    provider: str
    place: Place
    make: Callable[[], Call]
    about: Mapping[str, Any]
    case: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.provider}@{self.place.placement or 'full'}"

    @property
    def is_peer(self) -> bool:
        return self.provider == "cublas"


@dataclass(slots=True)
class GroupRunner:
    """Measures groups in partitions.

    Args:
        partitions: the partitions.
        dispatcher: of the device.
        meter: reads clock and power while the device is busy.
        budget_us: device time that the rounds of one group may take.
        backends: our providers, by the `backend` of `smkern.gemm`.
        peers: whether cuBLAS takes part.
        context: with cuBLAS on the whole chip, and our kernel told a wrong budget.
    """

    partitions: Partitions
    dispatcher: Dispatcher
    meter: PowerMeter
    budget_us: float = 12_000.0
    backends: Mapping[str, str | None] = field(default_factory=lambda: OUR_BACKENDS)
    peers: bool = True
    context: bool = True

    def measure(self, group: Group, ops: GemmOperands) -> list[Cell]:
        """The cells of a group, one a provider and place; one that cannot run has an `error`."""
        cells: list[Cell] = []
        cases: dict[str, Case] = {}
        contenders = {c.name: c for c in self._contenders(group, ops)}
        errors: dict[str, str] = {}
        problem = problem_of(group.n, group.k, group.m)
        for index, (name, contender) in enumerate(contenders.items()):
            call = self._checked(contender, ops, group.m, errors)
            if call is not None:
                ceiling = ceiling_of(
                    self.dispatcher.profile, contender.place.budget, contender.place.placement
                )
                calls = calls_for(ceiling.expected_us(problem))
                cases[name] = Case(call, contender.place.stream, calls, index)
        timings = time_within(self.budget_us, cases, while_busy=self.meter, errors=errors)
        best = _best_peer(contenders, timings)
        for name, contender in contenders.items():
            cells.append(self._cell(group, contender, timings.get(name), best, errors.get(name)))
        return cells + self._same_as_dispatched(group, cells)

    def _contenders(self, group: Group, ops: GemmOperands) -> list[Contender]:
        place = self.partitions.at(group.num_sms, "spread")
        full = self.partitions.full
        found: list[Contender] = []
        if place is not None:
            found += self._ours(group, ops, place)
        for peer in dict.fromkeys((place, self.partitions.at(group.num_sms, "default"))):
            if peer is not None and self.peers:
                found.append(_cublas("cublas", group, ops, peer))
        if not self.context:
            return found
        if place is not full:
            found.append(_cublas("cublas-full", group, ops, full))
        if place is not None and place is not full:
            found.append(self._wrong_budget(group, ops, place))
        return found

    def _ours(self, group: Group, ops: GemmOperands, place: Place) -> list[Contender]:
        """Our providers, those that pick the same configuration once."""
        found: dict[Any, Contender] = {}
        problem = problem_of(group.n, group.k, group.m)
        for provider, backend in self.backends.items():
            selection = self.dispatcher.select(problem, place.budget, backend)
            about = {"config": describe(selection.config), "source": selection.source}
            found.setdefault(
                selection.config,
                Contender(provider, place, _dispatched(ops, group.m, backend), about, group.case),
            )
        return list(found.values())

    def _wrong_budget(self, group: Group, ops: GemmOperands, place: Place) -> Contender:
        misled = Misled(self.dispatcher, self.partitions.full.budget)
        config = misled.config(group.n, group.k, group.m)
        case = {**group.case, "budget_told": misled.told.num_sms}
        about = {"config": describe(config)}
        return Contender(
            "wrong-budget", place, lambda: misled.call(ops, group.m, place), about, case
        )

    def _checked(
        self, contender: Contender, ops: GemmOperands, m: int, errors: dict[str, str]
    ) -> Call | None:
        """The contender's call after one eager run with the right result, else None."""
        try:
            call = contender.make()
        except SmkernError as error:
            errors[contender.name] = f"{type(error).__name__}: {error}"
            return None
        message = complaint(call, contender.place.stream, ops, m)
        if message is not None:
            errors[contender.name] = message
            return None
        return call

    def _cell(
        self,
        group: Group,
        contender: Contender,
        timing: Timing | None,
        best: tuple[str, Timing] | None,
        error: str | None,
    ) -> Cell:
        place = contender.place
        cell: Cell = {
            "op": "gemm",
            "case": dict(contender.case),
            "num_sms": place.num_sms,
            "mode": place.mode,
            "placement": place.placement,
            "group_sms": group.num_sms,
            "provider": contender.provider,
        }
        if timing is None:
            return cell | failed_cell(error or "not measured") | dict(contender.about)
        ceiling = ceiling_of(self.dispatcher.profile, place.budget, place.placement)
        clock, watts = self.meter.last
        cell |= measured_cell(problem_of(group.n, group.k, group.m), timing, ceiling)
        cell |= {"sm_mhz": clock, "watts": watts, **contender.about}
        if best is not None and contender.provider in self.backends:
            cell["vs_cublas"] = round(ratio(best[1], timing), 4)
            cell["best_cublas"] = best[0]
        return cell

    def _same_as_dispatched(self, group: Group, cells: list[Cell]) -> list[Cell]:
        """Cells of the providers that picked a configuration which was measured already."""
        place = self.partitions.at(group.num_sms, "spread")
        if place is None:
            return []
        problem = problem_of(group.n, group.k, group.m)
        ours = {cell["provider"]: cell for cell in cells if cell["provider"] in self.backends}
        copies = []
        for provider, backend in self.backends.items():
            if provider in ours:
                continue
            selection = self.dispatcher.select(problem, place.budget, backend)
            twin = next(c for c in ours.values() if c["config"] == describe(selection.config))
            about = {"provider": provider, "source": selection.source, "same_as": twin["provider"]}
            copies.append({**twin, **about})
        return copies


def _dispatched(ops: GemmOperands, m: int, backend: str | None) -> Callable[[], Call]:
    return lambda: dispatched_call(ops, m, backend=backend)


def _cublas(provider: str, group: Group, ops: GemmOperands, place: Place) -> Contender:
    return Contender(provider, place, lambda: cublas_call(ops, group.m), {}, group.case)


def _best_peer(
    contenders: Mapping[str, Contender], timings: Mapping[str, Timing]
) -> tuple[str, Timing] | None:
    """The faster of cuBLAS's places in this budget, and its timing."""
    peers = [
        (contenders[name].place.placement or "full", timing)
        for name, timing in timings.items()
        if contenders[name].is_peer
    ]
    return min(peers, key=lambda peer: peer[1].us_median) if peers else None


def note_again(first: list[Cell], second: list[Cell]) -> list[Cell]:
    """The first cells with `us_again` and `vs_cublas_again` of the second beside theirs."""
    again = {_provider_and_place(cell): cell for cell in second}
    noted = []
    for cell in first:
        twin = again.get(_provider_and_place(cell), {})
        extra = {f"{name}_again": twin[name] for name in ("us", "vs_cublas") if twin.get(name)}
        noted.append({**cell, **extra})
    return noted


def _provider_and_place(cell: Cell) -> tuple[str, str | None]:
    return cell["provider"], cell["placement"]
