"""Partitions on the virtual clock, a meter that always reads the same, and a suite's command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click
from click.testing import CliRunner

from smkern.bench.results import Results, load_results
from smkern.device import Budget
from smkern.measure.partitions import Place


class FakePartitions:
    """Every even budget has a spread place, multiples of 8 a default one; 132 is the chip."""

    def __init__(self, cuda, *options) -> None:
        self.cuda = cuda
        self.full = Place(Budget(132, "grid", True), cuda.new_stream())
        self.places = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def at(self, num_sms, placement="spread"):
        if num_sms == 132:
            return self.full
        if num_sms % (2 if placement == "spread" else 8):
            return None
        if (num_sms, placement) not in self.places:
            budget = Budget(num_sms, "mask", placement == "default")
            self.places[num_sms, placement] = Place(budget, self.cuda.new_stream(), placement)
        return self.places[num_sms, placement]


@dataclass
class Meter:
    last: tuple[float, float] = (1980.0, 400.0)

    def __call__(self) -> None:
        return None


def slowed(make, cuda, us):
    """A maker of calls whose calls take so long on the virtual clock."""

    def made(*args):
        call = make(*args)

        def timed(i):
            cuda.work_us(us)
            return call(i)

        return timed

    return made


def run_suite(command: click.Command, out: Path, *options: str) -> str:
    """What a suite printed that writes to `out` and succeeds."""
    ran = CliRunner().invoke(command, ["--out", str(out), *options], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


def stopped_after(out: Path, count: int) -> None:
    """Leave a file the cells that a run had measured first, each marked as `kept`."""
    results = load_results(out)
    left = Results(results.meta)
    for cell in results.cells[:count]:
        left.add(cell | {"kept": True})
    left.summary = results.summary
    left.save(out)


def resumed(command: click.Command, out: Path, count: int, *options: str) -> int:
    """How many cells a run keeps that resumes one stopped after `count`: the first ones, and the
    file is the uninterrupted run's."""
    whole = load_results(out)
    stopped_after(out, count)
    run_suite(command, out, "--resume", *options)
    again = load_results(out)
    assert list(again.by_key) == list(whole.by_key)
    assert again.summary.keys() == whole.summary.keys()
    assert again.summary.get("failed") == whole.summary.get("failed")
    kept = [cell.get("kept", False) for cell in again.cells]
    assert kept == sorted(kept, reverse=True)
    return sum(kept)
