"""`smkern bench partitions`: bandwidth by choice of SMs, and what partitions cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from rich.progress import Progress

import smkern
from smkern.bench.contexts import EIGHT, PAIR, Driver, Green, candidate_orders
from smkern.bench.partition_costs import has_costs, measure_costs
from smkern.bench.partition_rows import summarize
from smkern.bench.reader import Reader
from smkern.bench.reads import best_reader, time_reads
from smkern.bench.results import Results
from smkern.bench.rows import Cell
from smkern.bench.suite import BUDGETS_OPTION, Output, Run, show, suite_command
from smkern.device import device_info
from smkern.measure.timing import Timing

FINE_RUNGS = (12, 20, 28)
"""Between the eighths, where bandwidth bends; no peer makes such partitions."""
QUICK_RUNGS = (8, 16, 32)
PICK_AT = (8, 16, 32)
"""Where readers are compared: on more SMs all of them saturate the memory."""


def default_rungs(total: int) -> tuple[int, ...]:
    """Those of the default ladder, the multiples of 8, and `FINE_RUNGS`."""
    return tuple(sorted({*range(EIGHT, total, EIGHT), *(n for n in FINE_RUNGS if n < total)}))


@dataclass(slots=True)
class Candidates:
    """Partitions of any pairs of SMs, and the orders in which to take them."""

    driver: Driver
    pairs: list[Any]
    orders: dict[str, list[int]]
    by_eights: int
    """SMs in the driver's own groups of 8, the remainder left out."""

    def at(self, num_sms: int) -> Iterator[tuple[str, Green]]:
        for name, order in self.orders.items():
            taken = [self.pairs[i] for i in order[: num_sms // PAIR]]
            yield f"order:{name}", self.driver.create(taken)


def find_candidates(driver: Driver) -> Candidates:
    """Ask each of the driver's groups where it lies, then order them."""

    def sms_of(groups: Sequence[Any]) -> list[tuple[int, ...]]:
        found = []
        for group in groups:
            with closing(driver.create([group])) as green:
                found.append(driver.sms_of(green))
        return found

    pairs, (eights, rest) = driver.pairs(), driver.eights()
    orders = candidate_orders(sms_of(pairs), sms_of([*eights, *([rest] if rest else [])]))
    return Candidates(driver, pairs, orders, EIGHT * len(eights))


@dataclass(slots=True)
class Choices:
    """Measures rung by rung; everything at a rung is timed in the same rounds.

    What fails is named in `errors`.
    """

    reader: Reader
    driver: Driver
    candidates: Candidates
    ladders: Mapping[str, Any]
    errors: dict[str, str]

    def rung(self, num_sms: int) -> list[Cell]:
        """Every choice of `num_sms` SMs: ours, the peers', the candidates."""
        places = dict(self._ours(num_sms))
        with ExitStack() as opened:
            for name, made in self._foreign(num_sms):
                opened.callback(made.close)
                places[name] = self._seen(name, made)
            failed: dict[str, str] = {}
            timings = time_reads(self.reader, places, errors=failed)
            self.errors.update({f"{name} on {num_sms} SMs": why for name, why in failed.items()})
            return [self._cell(name, num_sms, places[name], t) for name, t in timings.items()]

    def _ours(self, num_sms: int) -> Iterator[tuple[str, Green]]:
        """The decode side of our ladders: `smkern`, spread, and `driver`, its default groups."""
        for name, ladder in self.ladders.items():
            if num_sms in ladder.rungs:
                partition = ladder.split(decode=num_sms).decode
                yield name, Green(partition.num_sms, partition.stream)

    def _foreign(self, num_sms: int) -> Iterator[tuple[str, Green]]:
        yield from self.candidates.at(num_sms)
        if num_sms % EIGHT:
            return
        for name, make in (
            ("flashinfer-way", self.driver.one_group),
            ("torch", self.driver.torch_green),
        ):
            try:
                yield name, make(num_sms)
            except Exception as error:  # noqa: BLE001  what a peer raises is its result
                self.errors[f"{name} on {num_sms} SMs"] = f"{type(error).__name__}: {error}"

    def _seen(self, name: str, green: Green) -> Green:
        """The same with the count of SMs that its work reaches, which is what it was granted."""
        seen = len(self.driver.sms_of(green))
        if seen == green.num_sms:
            return green
        self.errors[f"{name}: granted {green.num_sms} SMs"] = f"its work ran on {seen}"
        return replace(green, num_sms=seen)

    def _cell(self, name: str, asked: int, place: Green, timing: Timing) -> Cell:
        us = timing.us_median
        return {
            "op": "read",
            "case": {"bytes": self.reader.num_bytes, "asked_sms": asked},
            "num_sms": place.num_sms,
            "mode": "green",
            "provider": name,
            "us": round(us, 2),
            "tflops": None,
            "tbps": round(self.reader.tbps(us), 4),
            "fraction_of_ceiling": None,
            "noise": round(timing.noise, 4),
        }


def run(rungs: Sequence[int], results: Results, output: Output) -> None:
    """Measure what `results` lacks. The costs come first, before any partition.

    Costs are measured together, and so is what is at a rung: where a cell of it is there, all is
    that did not fail.
    """
    torch.cuda.init()
    first = Reader(0)
    progress = Progress()
    run = Run(results, output, summarize, progress)
    if not has_costs(results.cells):
        for cell in measure_costs(first):
            results.add(cell)
        run.save()
    done = {cell["case"]["asked_sms"] for cell in results.cells if cell["op"] == "read"}
    left = [n for n in rungs if n not in done]
    if not left:
        return
    with smkern.ladder(list(PICK_AT)) as small:
        parts = [small.split(decode=n).decode for n in PICK_AT]
        places = (Green(x.num_sms, x.stream) for x in parts)
        reader = best_reader(places, first.data, among=[results.meta.get("reader")])
    results.meta["reader"] = reader.shape.name
    driver = Driver()
    candidates = find_candidates(driver)
    eighths = [n for n in rungs if n % EIGHT == 0 and n <= candidates.by_eights]
    with ExitStack() as stack:
        ladders = {"smkern": stack.enter_context(smkern.ladder(list(rungs)))}
        if eighths:
            default = smkern.ladder(eighths, atom=EIGHT, placement="default")
            ladders["driver"] = stack.enter_context(default)
        choices = Choices(reader, driver, candidates, ladders, run.errors)
        stack.enter_context(progress)
        run.through(left, choices.rung, len(left))


@suite_command("partitions", BUDGETS_OPTION)
def command(output: Output, *, budgets: Any) -> None:
    """Time reads from SMs chosen by smkern, the driver, torch, FlashInfer's way and at random.

    Beside them the host time and memory of making a ladder, of switching partitions, and of
    asking for the SM count.
    """
    total = device_info().num_sms
    rungs = budgets or (QUICK_RUNGS if output.quick else default_rungs(total))
    _check_rungs(rungs, total)
    results = output.open()
    run(sorted(set(rungs)), results, output)
    show(results, output.path)


def _check_rungs(rungs: Sequence[int], total: int) -> None:
    wrong = [n for n in rungs if n % PAIR or not 0 < n < total]
    if wrong:
        raise click.BadParameter(
            f"{wrong} cannot be partitions of {total} SMs; give even counts from 2 to {total - 2}",
            param_hint="--budgets",
        )
