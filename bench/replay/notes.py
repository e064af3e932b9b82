"""What a results file of `smkern replay` says of its replays that no cell of it says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from smkern.bench.replay.cases import trace_file, trace_name
from smkern.bench.replay.measure import How
from smkern.bench.results import Results

REMEDY = "name another file with --out"


def note_table(results: Results, path: Path | None) -> None:
    """Note in a results file which table timed its replays.

    Raises:
        UsageError: the cells that it has were timed by another.
    """
    named = path and f"{path.name} {_digest(path)}"
    known = results.meta.get("table")
    if results.cells and known != named:
        raise click.UsageError(
            f"its replays were timed by {known or 'the shipped table'}, not by "
            f"{named or 'that'}: {REMEDY}"
        )
    if named:
        results.meta["table"] = named


def note_rates(results: Results, how: How, drain: bool) -> None:
    """Note in a results file how traces are replayed at a rate.

    Raises:
        UsageError: the cells that it has are of other settings.
    """
    known = any("rate_rps" in cell["case"] for cell in results.cells)
    _note(results, "rates", _settings(how) | {"drain": drain}, known)


def note_goodputs(results: Results, how: How, where: str) -> None:
    """Note in a results file how goodputs are sought, and whether simulated or on the GPU.

    Raises:
        UsageError: the cells that it has are of other settings.
    """
    known = any("rate_rps" not in cell["case"] for cell in results.cells)
    _note(results, "goodputs", _settings(how) | {"seeds": list(how.seeds), "where": where}, known)


def note_traces(results: Results, traces: Sequence[str], folder: Path) -> None:
    """Note in a results file what the recorded traces hold that it calls by their names.

    Raises:
        UsageError: the cells that it has are of another file of that name.
    """
    noted = results.meta.get("traces", {})
    replayed = {cell["case"]["trace"] for cell in results.cells}
    found = {}
    for trace in traces:
        name, path = trace_name(trace), trace_file(trace, folder)
        if path is not None and path.is_file():
            found[name] = _digest(path)
        if name in replayed and noted.get(name) != found.get(name):
            raise click.UsageError(
                f"its replays of {name} are not of {path or 'the generated trace'}: {REMEDY}"
            )
    if found:
        results.meta["traces"] = noted | found


def _settings(how: How) -> dict[str, Any]:
    return {
        "seconds": how.seconds,
        "arrivals": how.arrivals,
        "overlong": how.overlong,
        "rungs": list(how.rungs),
    }


def _note(results: Results, kind: str, settings: dict[str, Any], has_cells: bool) -> None:
    noted = results.meta.setdefault("settings", {})
    known = noted.get(kind, {})
    if has_cells and known != settings:
        others = [name for name in settings if known.get(name) != settings[name]]
        its = ", ".join(f"{name} {known.get(name, 'unknown')}" for name in others)
        ours = ", ".join(f"{name} {settings[name]}" for name in others)
        raise click.UsageError(f"its {kind} are of {its}, not of {ours}: {REMEDY}")
    noted[kind] = settings


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
