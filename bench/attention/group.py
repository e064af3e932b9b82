"""One attention case in one budget: every provider checked once, then timed in the same rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from smkern.bench.attention.cases import AttentionCase, AttentionGroup
from smkern.bench.attention.operands import AttentionOperands
from smkern.bench.attention.providers import Contender, Peers, our_contenders, plan_of
from smkern.bench.cells import ceiling_of, failed_cell, measured_cell
from smkern.bench.power import PowerMeter
from smkern.bench.stage import Place, Stage
from smkern.bench.timing import (
    Call,
    Case,
    Timing,
    calls_for,
    ratio,
    rounds_for,
    time_interleaved,
    try_eagerly,
)
from smkern.device import Profile

Cell = dict[str, Any]

OP, PLAN_OP = "paged_attention", "plan_attention"
TOLERANCE = 2e-2
"""|out - reference| / |reference| of a bf16 result; bf16 probabilities alone give 3e-3."""
PLAN_CALLS = 32


def is_losing(cell: Cell) -> bool:
    """Whether one of our cells, as dispatched, is slower than FlashInfer's best way."""
    return cell["provider"] == "smkern" and (cell.get("vs_flashinfer") or 1.0) < 1.0


@dataclass(slots=True)
class AttentionRunner:
    """Measures groups on a stage.

    Args:
        stage: the partitions.
        profile: the device's ceilings.
        meter: reads clock and power while the device is busy.
        budget_us: device time that the rounds of one group may take.
    """

    stage: Stage
    profile: Profile
    meter: PowerMeter
    budget_us: float = 150_000.0

    def measure(
        self, group: AttentionGroup, ops: AttentionOperands, peers: Peers, *, again: bool = True
    ) -> list[Cell]:
        """The cells of a group: attention by every provider and place, and the plan itself.

        A provider that cannot run has an `error`. Of a peer's cache layouts the better counts.
        A group that loses to FlashInfer is measured a second time; both results stand.
        """
        place = self.stage.at(group.num_sms)
        if place is None:
            return []
        ours = list(our_contenders(ops, place))
        places = dict.fromkeys((place, self.stage.at(group.num_sms, "default")))
        contenders = ours + [c for at in places if at is not None for c in peers.at(at)]
        cells = self._attention(group, ops, contenders)
        if again and any(is_losing(cell) for cell in cells):
            cells = note_again(cells, self._attention(group, ops, contenders))
        return [*cells, self._plan(group, ops, place)]

    def _attention(
        self, group: AttentionGroup, ops: AttentionOperands, contenders: list[Contender]
    ) -> list[Cell]:
        errors: dict[str, str] = {}
        cases: dict[str, Case] = {}
        for index, contender in enumerate(contenders):
            call = checked(contender, ops, errors)
            if call is not None:
                cases[contender.name] = Case(call, contender.place.stream, 1, index)
        timings = self._time(cases, errors)
        cells = {
            c.name: self._cell(group.case, c, timings.get(c.name), errors.get(c.name))
            | {"group_sms": group.num_sms}
            for c in contenders
        }
        best = best_of_layouts(cells)
        kept = {name: timings[name] for name in best if name in timings}
        for contender in contenders:
            if contender.is_ours and contender.name in timings:
                best[contender.name] |= compared(timings[contender.name], best, kept)
        return list(best.values())

    def _time(self, cases: dict[str, Case], errors: dict[str, str]) -> dict[str, Timing]:
        if not cases:
            return {}
        once = time_interleaved(cases, rounds=1, errors=errors)
        cases = {
            name: replace(case, calls=calls_for(once[name].us_median))
            for name, case in cases.items()
            if name in once
        }
        replay_us = sum(once[name].us_median * case.calls for name, case in cases.items())
        rounds = rounds_for(replay_us, budget_us=self.budget_us)
        return time_interleaved(cases, rounds=rounds, while_busy=self.meter, errors=errors)

    def _cell(
        self, case: AttentionCase, contender: Contender, timing: Timing | None, error: str | None
    ) -> Cell:
        place = contender.place
        cell = cell_head(OP, case.about, place, contender.provider) | dict(contender.about)
        if timing is None:
            return cell | failed_cell(error or "not measured")
        ceiling = ceiling_of(self.profile, place.budget, place.placement)
        clock, watts = self.meter.last
        cell |= measured_cell(case, timing, ceiling) | {"sm_mhz": clock, "watts": watts}
        return cell | dict(contender.tell())

    def _plan(self, group: AttentionGroup, ops: AttentionOperands, place: Place) -> Cell:
        """The plan by itself: refilled on the device, many times in one graph."""
        cell = cell_head(PLAN_OP, group.case.about, place, "smkern")
        cell["group_sms"] = group.num_sms
        errors: dict[str, str] = {}
        try:
            plan = plan_of(ops, place)
        except Exception as error:  # noqa: BLE001  a cell that cannot be measured says why
            return cell | failed_cell(f"{type(error).__name__}: {error}".splitlines()[0])

        def call(i: int) -> None:
            plan_of(ops, place, out=plan)

        message = try_eagerly(call, place.stream)
        if message is None:
            case = Case(call, place.stream, PLAN_CALLS)
            timings = time_interleaved({"plan": case}, rounds=7, errors=errors)
            if "plan" in timings:
                timing = timings["plan"]
                return cell | {"us": round(timing.us_median, 3), "noise": round(timing.noise, 4)}
            message = errors["plan"]
        return cell | failed_cell(message)


def cell_head(op: str, about: Mapping[str, Any], place: Place, provider: str) -> Cell:
    return {
        "op": op,
        "case": dict(about),
        "num_sms": place.num_sms,
        "mode": place.mode,
        "placement": place.placement,
        "provider": provider,
    }


def checked(contender: Contender, ops: AttentionOperands, errors: dict[str, str]) -> Call | None:
    """The contender's call after one eager run with the right result, else None and its error."""
    results: list[torch.Tensor] = []
    ops.reference()
    ops.poison()
    torch.cuda.synchronize()
    try:
        call = contender.make()
        message = try_eagerly(lambda i: results.append(call(i)), contender.place.stream)
    except Exception as error:  # noqa: BLE001  whatever a peer raises is its result
        message = f"{type(error).__name__}: {error}".splitlines()[0]
    if message is None:
        relative = ops.error(results[0].reshape(ops.reference().shape))
        if relative < TOLERANCE:
            return call
        message = f"wrong result: |out - torch| / |torch| is {relative:.3g}, at most {TOLERANCE}"
    errors[contender.name] = message
    return None


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
        is_peer = not provider.startswith("smkern")
        if is_peer and (rival is None or peer.us_median < timings[rival].us_median):
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
