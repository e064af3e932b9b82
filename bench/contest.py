"""A case's contenders in one budget: each checked once, then timed in the same rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smkern.bench.cells import Work, ceiling_of, failed_cell, measured_cell
from smkern.bench.power import PowerMeter
from smkern.measure.partitions import Partitions, Place
from smkern.measure.timing import Call, Case, Timing, ratio, time_within, try_eagerly
from smkern.profile import Profile

Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Contender:
    """A provider on a stream. `make` prepares its call.

    `about` goes into its cell, and what `tell` says once it ran.
    """

    provider: str
    place: Place
    make: Callable[[], Call]
    about: Mapping[str, Any]
    tell: Callable[[], Mapping[str, Any]] = dict

    @property
    def name(self) -> str:
        layout = self.about.get("layout", "")
        return f"{self.provider}@{self.place.placement or 'full'}{layout and ':' + layout}"

    @property
    def is_ours(self) -> bool:
        return is_ours(self.provider)


def is_ours(provider: str) -> bool:
    """smkern as dispatched, or one of its kernels."""
    return provider.partition(":")[0] == "smkern"


@dataclass(slots=True)
class Contest:
    """What a suite's runner needs to measure its groups.

    Args:
        partitions: the partitions.
        profile: the device's ceilings.
        meter: reads clock and power while the device is busy.
        budget_us: device time that the rounds of one group may take.
    """

    partitions: Partitions
    profile: Profile
    meter: PowerMeter
    budget_us: float

    def round(
        self,
        contenders: Sequence[Contender],
        check: Callable[[Contender, dict[str, str]], Call | None],
        cell: Callable[[Contender, Timing | None, str | None], Cell],
    ) -> list[Cell]:
        """A cell a provider and place, of its best layout; ours with their ratios to the peers.

        Args:
            contenders: who takes part.
            check: a contender's call, or None and its error under its name.
            cell: of a contender's timing, or of its error.
        """
        errors: dict[str, str] = {}
        cases: dict[str, Case] = {}
        for index, contender in enumerate(contenders):
            call = check(contender, errors)
            if call is not None:
                cases[contender.name] = Case(call, contender.place.stream, 1, index)
        timings = time_within(self.budget_us, cases, while_busy=self.meter, errors=errors)
        cells = {c.name: cell(c, timings.get(c.name), errors.get(c.name)) for c in contenders}
        best = best_of_layouts(cells)
        kept = {name: timings[name] for name in best if name in timings}
        for contender in contenders:
            if contender.is_ours and contender.name in kept:
                best[contender.name] |= compared(kept[contender.name], best, kept)
        return list(best.values())

    def figures(
        self, work: Work, contender: Contender, timing: Timing | None, error: str | None
    ) -> Cell:
        """What a cell says after its head: the figures and what the contender tells, or why not."""
        if timing is None:
            return failed_cell(error or "not measured")
        place = contender.place
        ceiling = ceiling_of(self.profile, place.budget, place.placement)
        clock, watts = self.meter.last
        cell = measured_cell(work, timing, ceiling) | {"sm_mhz": clock, "watts": watts}
        return cell | dict(contender.tell())


def checked_call(
    contender: Contender, errors: dict[str, str], complaint: Callable[[Any], str | None]
) -> Call | None:
    """The contender's call after one eager run with the right result, else None and its error.

    Args:
        contender: its output is poisoned already.
        errors: contender's name to the error's first line.
        complaint: what is wrong after the run, of what the call returned.
    """
    results: list[Any] = []
    torch.cuda.synchronize()
    try:
        call = contender.make()
        message = try_eagerly(lambda i: results.append(call(i)), contender.place.stream)
    except Exception as error:  # noqa: BLE001  whatever a peer raises is its result
        message = f"{type(error).__name__}: {error}".splitlines()[0]
    if message is None:
        message = complaint(results[0])
        if message is None:
            return call
    errors[contender.name] = message
    return None


def cell_head(op: str, about: Mapping[str, Any], place: Place, provider: str) -> Cell:
    return {
        "op": op,
        "case": dict(about),
        "num_sms": place.num_sms,
        "mode": place.mode,
        "placement": place.placement,
        "provider": provider,
    }


def best_of_layouts(cells: Mapping[str, Cell]) -> dict[str, Cell]:
    """One cell a provider and place: the fastest of its layouts, or an error if all failed."""
    chosen: dict[tuple[str, str | None], str] = {}
    for name, cell in cells.items():
        key = cell["provider"], cell["placement"]
        rival = chosen.get(key)
        if rival is None or _us(cell) < _us(cells[rival]):
            chosen[key] = name
    return {name: cells[name] for name in chosen.values()}


def compared(
    timing: Timing, cells: Mapping[str, Cell], timings: Mapping[str, Timing]
) -> dict[str, Any]:
    """What goes into our cell: each peer's time over ours, in the peer's better place.

    `vs` provider to ratio; `vs_flashinfer` and `best_flashinfer` the fastest of FlashInfer's ways;
    `vs_best` and `best_peer` the fastest of all.
    """
    fastest: dict[str, str] = {}
    for name, peer in timings.items():
        provider = cells[name]["provider"]
        rival = fastest.get(provider)
        slower = rival is not None and peer.us_median >= timings[rival].us_median
        if not is_ours(provider) and not slower:
            fastest[provider] = name
    ratios = {p: round(ratio(timings[name], timing), 4) for p, name in fastest.items()}
    found: dict[str, Any] = {"vs": ratios} if ratios else {}
    for label, key, members in (
        ("vs_best", "best_peer", ratios),
        ("vs_flashinfer", "best_flashinfer", _starting(ratios, "flashinfer:")),
    ):
        if members:
            provider = min(members, key=members.__getitem__)
            found |= {label: members[provider], key: provider}
    return found


def note_again(first: Iterable[Cell], second: Iterable[Cell]) -> list[Cell]:
    """The first cells with the second's time and ratios beside theirs, under `*_again`."""
    again = {(cell["provider"], cell["placement"]): cell for cell in second}
    noted = []
    for cell in first:
        twin = again.get((cell["provider"], cell["placement"]), {})
        names = ("us", "vs", "vs_flashinfer", "vs_best")
        noted.append(cell | {f"{name}_again": twin[name] for name in names if twin.get(name)})
    return noted


def _starting(ratios: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name: value for name, value in ratios.items() if name.startswith(prefix)}


def _us(cell: Cell) -> float:
    return cell.get("us") or float("inf")
