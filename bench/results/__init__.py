"""Results files: `{"meta": {...}, "cells": [...], "summary": {...}}`, a cell a line.

A suite may be measured in several runs: each loads the file, adds its cells (a cell measured again
replaces the old one) and writes the file whole, by a temporary file and a rename.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from smkern.atomic import read_whole, write_whole
from smkern.device import device_info, gpu_folder
from smkern.errors import DeviceError, SmkernError
from smkern.strict_json import parse

JsonDict = dict[str, Any]

IDENTITY = ("op", "case", "num_sms", "mode", "placement", "group_sms", "provider")
"""What makes two cells the same measurement. `group_sms` is the budget whose rounds it was in."""
_SORTED = json.JSONEncoder(sort_keys=True)
"""Made once: `json.dumps` would make one a cell."""


FOLDER = Path(__file__).resolve().parent
COMMITTED = gpu_folder("NVIDIA H200")
"""The folder in `FOLDER` that README, pictures and demo show where no GPU is asked about."""


_SUITE = re.compile(r"\bbench[ .]([a-z][a-z0-9-]*)")
_JOINED = {"replay-confirm": "replay"}
"""Suites that add to another's file."""
SUMMARIES = {
    "attention": "attention.rows", "ceilings": "ceiling_rows", "cliffs": "cliffs",
    "cutlass": "cutlass", "engines": "engines.rows", "fp8": "fp8_rows", "gemm": "gemm_rows",
    "host": "host_cost", "layouts": "attention.layouts", "model": "model.rows", "ops": "ops.rows",
    "partitions": "partition_rows", "power": "prompt_power_rows", "ranks": "ranks.rows",
    "replay": "replay.rows", "runtime": "runtime.rows", "server": "server", "untuned": "untuned",
}  # fmt: skip
"""What makes the rows of a suite's merged file."""
REMEDY = "delete it, or measure into another file with --out"
_OF_A_RUN = ("date", "command", "smkern_commit", "flashinfer", "deepgemm")
"""What `meta` says of a run, its peers' versions among it; of the latest beside `runs` too."""


class ResultsError(SmkernError, ValueError):
    """A results file that is corrupt, half-written, another GPU's or not a results file."""


def results_folder() -> Path:
    """Where results of this machine's GPU belong; without one, which measures nothing, `unknown`.

    No other GPU's folder: a figure lies under the name of the chip that it was measured on.
    """
    try:
        gpu = device_info().name
    except DeviceError:
        gpu = ""
    return Path("bench") / "results" / gpu_folder(gpu)


def cell_key(cell: Mapping[str, Any]) -> str:
    """A cell's identity as a string; sorts by operator, case, budget and provider."""
    return _SORTED.encode([cell.get(name) for name in IDENTITY])


@dataclass(slots=True)
class Results:
    """The cells of one suite, keyed by identity, in the order they were first measured.

    `summary` is of these cells: where one is added there is none, until it is made anew.
    """

    meta: JsonDict = field(default_factory=dict)
    by_key: dict[str, JsonDict] = field(default_factory=dict)
    summary: JsonDict = field(default_factory=dict)

    @property
    def cells(self) -> list[JsonDict]:
        return list(self.by_key.values())

    def add(self, cell: Mapping[str, Any]) -> None:
        self.by_key[cell_key(cell)] = dict(cell)
        self.summary = {}

    def drop(self, goes: Callable[[JsonDict], bool]) -> None:
        """Forget the cells of which that is true."""
        self.by_key = {key: cell for key, cell in self.by_key.items() if not goes(cell)}

    def merge(self, other: Results) -> None:
        """Take over the other's cells and provenance; where both measured, the other counts.

        One that saw no GPU, as it simulated, leaves what these say of theirs.

        Raises:
            ResultsError: they are of different GPUs, or of different suites.
        """
        for what, of in (("GPU", _gpus), ("suite", _suites)):
            mine, its = of(self.meta), of(other.meta)
            if mine and its and mine.isdisjoint(its):
                found = " and of ".join(", ".join(map(repr, sorted(x))) for x in (mine, its))
                raise ResultsError(
                    f"results of {found} are no one file's: keep a file for each {what}"
                )
        for cell in other.cells:
            self.add(cell)
        runs = [*_runs(self.meta), *_runs(other.meta)]
        self.meta |= {k: v for k, v in other.meta.items() if v is not None or _gpus(other.meta)}
        if len(unique := _unique(runs)) > 1:
            self.meta["runs"] = unique

    def save(self, path: Path) -> None:
        """Write the file atomically: whoever reads it sees the old one or the new one, whole."""
        write_whole(path, self.dump())

    def dump(self) -> str:
        lines = ",\n".join(json.dumps(cell, allow_nan=False) for cell in self.by_key.values())
        meta = json.dumps(self.meta, indent=1, allow_nan=False)
        summary = json.dumps(self.summary, indent=1, allow_nan=False)
        return f'{{"meta": {meta},\n"cells": [\n{lines}\n],\n"summary": {summary}}}\n'


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Cells that turn out not to be as their suite writes them are an error of their file.

    Raises:
        ResultsError: with what was wrong.
    """
    try:
        yield
    except SmkernError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ResultsError(
            f"{path} has cells that are not as its suite writes them ({error!r}); {REMEDY}"
        ) from error


def load_results(path: Path) -> Results:
    """Read a results file.

    Raises:
        ResultsError: it is no JSON, or lacks `meta`, `cells` or `summary`.
        FileNotFoundError: there is none.
    """
    try:
        data = parse(read_whole(path))
    except ValueError as error:
        raise ResultsError(f"{path} is not a results file ({error}); {REMEDY}") from error
    shape = {"meta": dict, "cells": list, "summary": dict}
    for name, kind in shape.items():
        if not isinstance(data, dict) or not isinstance(data.get(name), kind):
            raise ResultsError(f"{path} has no {name!r} of type {kind.__name__}; {REMEDY}")
    results = Results(meta=data["meta"])
    for cell in data["cells"]:
        if not isinstance(cell, dict) or "op" not in cell or "provider" not in cell:
            raise ResultsError(f"{path} has a cell without op and provider: {cell!r:.80}; {REMEDY}")
        results.add(cell)
    results.summary = data["summary"]
    return results


def open_results(path: Path, *, resume: bool, meta: JsonDict) -> Results:
    """A fresh `Results`, or with `resume` the file's, with this run's provenance added.

    Raises:
        ResultsError: the file holds another GPU's figures, cannot be written, or with `resume` is
            no results file.
    """
    _check_writable(path)
    fresh = Results(meta=meta)
    if not path.exists():
        return fresh
    try:
        results = load_results(path)
    except ResultsError:
        if resume:
            raise
        return fresh
    try:
        results.merge(fresh)
    except ResultsError as error:
        raise ResultsError(f"{path}: {error}; name another with --out") from error
    return results if resume else fresh


def _check_writable(path: Path) -> None:
    """Raise ResultsError where no file can be made; before hours of measuring, not after."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        why = "is not writable" if folder.is_dir() else "is no folder"
        raise ResultsError(f"{path} cannot be written: {folder} {why}; name another with --out")


def _runs(meta: JsonDict) -> list[JsonDict]:
    own = {name: meta[name] for name in _OF_A_RUN if name in meta}
    return [*meta.get("runs", []), *([own] if own else [])]


def _gpus(meta: JsonDict) -> set[str]:
    return {meta["gpu"]} if meta.get("gpu") else set()


def _suites(meta: JsonDict) -> set[str]:
    """By the commands that measured; those that are none of a suite (a test's) say nothing."""
    commands = " ; ".join(str(run.get("command")) for run in _runs(meta))
    return {_JOINED.get(name, name) for name in _SUITE.findall(commands.replace("_", "-"))}


def _unique(runs: Iterable[JsonDict]) -> list[JsonDict]:
    return list({json.dumps(run, sort_keys=True): run for run in runs}.values())


def merge_files(parts: Sequence[Path], out: Path) -> Results:
    """Write the results of files of one suite as one; of a cell in two the later file's counts.

    What failed in any of them is told.

    Raises:
        ResultsError: a file is no results file, or of another GPU or suite than one before.
    """
    from smkern.bench.runtime.rows import renew

    merged, failed = Results(), dict[str, str]()
    for part in parts:
        results = load_results(part)
        failed |= results.summary.get("failed", {})
        merged.merge(results)
    with reading(Path(" and ".join(map(str, parts)))):
        renew(merged)
        for suite in sorted(_suites(merged.meta) & set(SUMMARIES)):
            rows = import_module(f"smkern.bench.{SUMMARIES[suite]}")
            merged.summary |= rows.summarize(merged.cells)
    if failed:
        merged.summary["failed"] = failed
    merged.save(out)
    return merged


@click.command("merge")
@click.argument("parts", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File.")
def command(parts: tuple[Path, ...], out: Path) -> None:
    """Merge results files of one suite; where two measured a cell, the later argument counts."""
    merged = merge_files(parts, out)
    click.echo(f"{len(merged.by_key)} cells in {out}")
