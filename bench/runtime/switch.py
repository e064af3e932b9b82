"""What a switch between rungs costs: host time, the SMs' hand-over, tokens that are lost."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from smkern.bench.runtime.cases import HANDOVER, SWITCH, Cell
from smkern.bench.runtime.figures import percentile
from smkern.bench.runtime.steady_bench import Feed, SteadyBench
from smkern.errors import StalledError
from smkern.runtime.device import Work
from smkern.runtime.place import LANES, Lane, Place
from smkern.runtime.ticket import Ticket

EVERY = 4
"""Decode steps on a rung."""
SWITCHES = 30
RATE_S = 0.6


@dataclass(slots=True)
class Watched:
    """A work that tells when its run was entered."""

    entered_us: float = 0.0

    def wrap(self, work: Work) -> Work:
        def run(place: Place) -> None:
            self.entered_us = time.perf_counter_ns() / 1e3
            work.run(place)

        return Work(work.name, run, work.size, work.launches, work.about)


@dataclass(slots=True)
class Switches:
    """What happened at each change of rung.

    Attributes:
        host_us: From the decision until the first launch on the new rung was entered.
        launch_us: From the decision until that launch had returned.
        decided: Time, rung and number of launches so far, of each decision.
        tickets: Every launch.
    """

    host_us: list[float] = field(default_factory=list)
    launch_us: list[float] = field(default_factory=list)
    decided: list[tuple[float, int, int]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)

    def handovers(self, num_sms: int) -> tuple[list[float], list[float]]:
        """us from each decision to the shrinker's end on its old SMs, and to the grower's start."""
        ends, starts = [], []
        for index, (at_us, rung, first) in enumerate(self.decided):
            if index == 0:
                continue
            before = self.decided[index - 1][1]
            grower: Lane = "decode" if rung > before else "prefill"
            shrinker: Lane = "prefill" if grower == "decode" else "decode"
            new, old = Place.of(grower, rung, num_sms), Place.of(shrinker, before, num_sms)
            earlier, later = self.tickets[:first], self.tickets[first:]
            left = [t for t in earlier if t.lane == shrinker and t.place == old]
            came = next((t for t in later if t.lane == grower and t.place == new), None)
            ended = left[-1].event.times_us() if left else None
            began = None if came is None else came.event.times_us()
            if ended is not None:
                ends.append(max(0.0, ended[1] - at_us))
            if began is not None:
                starts.append(max(0.0, began[0] - at_us))
        return ends, starts


def switch_cells(bench: SteadyBench, rungs: Sequence[int]) -> Iterator[Cell]:
    """Two rungs by turns, a few decode steps each, beside prompts; against each of them alone."""
    bench.prepare(*rungs)
    alone = {rung: bench.together(rung, seconds=RATE_S) for rung in rungs}
    steady = {rung: found.tokens_per_ms for rung, found in alone.items()}
    # as many steps on each rung: those on the smaller one last longer
    shares = {rung: statistics.median(found.steps.periods_us) for rung, found in alone.items()}
    expected = sum(steady[n] * shares[n] for n in rungs) / sum(shares.values())
    for impatient in (False, True):
        found, rate = _alternate(bench, rungs, impatient=impatient)
        provider = f"{bench.steps.provider}{':impatient' if impatient else ''}"
        ends, starts = found.handovers(bench.device.num_sms)
        about = {"rungs": list(rungs), "every_steps": EVERY, "switches": len(found.decided)}
        yield (
            bench.plan.cell(SWITCH, provider, _us(found.host_us, 0.5), "us")
            | about
            | {
                "p99": _us(found.host_us, 0.99),
                "with_launch_p50": _us(found.launch_us, 0.5),
                "with_launch_p99": _us(found.launch_us, 0.99),
            }
        )
        lost = {
            "tokens_per_ms": round(rate, 3),
            "steady_tokens_per_ms": {str(n): round(x, 3) for n, x in steady.items()},
            "tokens_per_ms_lost": round(expected - rate, 3),
        }
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            cell = bench.plan.cell(f"{HANDOVER}_{name}", provider, _us(ends, share), "us")
            yield cell | about | lost | {"grower_began_us": _us(starts, share)}


def _us(values: Sequence[float], share: float) -> float | None:
    return round(percentile(values, share), 2) if values else None


def _alternate(
    bench: SteadyBench, rungs: Sequence[int], *, impatient: bool
) -> tuple[Switches, float]:
    """Switches, and the prompts' tokens per ms meanwhile."""
    found, watched = Switches(), Watched()
    lanes = bench.lanes(rungs[1], impatient=impatient, on_launch=found.tickets.append)
    decode = Feed("decode", 2, map(watched.wrap, bench.decode_steps()))
    prompt = Feed("prefill", 2, map(watched.wrap, bench.prompt_groups()))
    feeds: dict[Lane, Feed] = {"decode": decode, "prefill": prompt}
    due, rung = EVERY, rungs[1]
    while len(found.decided) <= SWITCHES:
        lanes.poll()
        if decode.launched >= due:
            wanted = rungs[len(found.decided) % 2]
            shrinks: Lane = "decode" if wanted < rung else "prefill"
            # the side that shrinks has room now, so that the first launch there is timed
            if lanes.queued(shrinks) >= feeds[shrinks].depth:
                lanes.wait()
                continue
            first, began = len(found.tickets), time.perf_counter_ns() / 1e3
            lanes.aim(wanted)
            if not feeds[shrinks].launch(lanes):
                raise StalledError(f"the {shrinks} lane cannot move from {rung} to {wanted} SMs")
            found.host_us.append(watched.entered_us - began)
            found.launch_us.append(time.perf_counter_ns() / 1e3 - began)
            found.decided.append((began, wanted, first))
            rung = wanted
            due = decode.launched + EVERY
        for lane in LANES:
            feeds[lane].top_up(lanes)
        lanes.wait()
    lanes.drain()
    return found, bench.read().tokens_per_ms
