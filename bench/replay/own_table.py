"""A latency table of one's own, in place of the shipped one of a model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import click

from smkern.bench.results import Results
from smkern.errors import TableError
from smkern.latency import TablePredictor
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import read_timings
from smkern.models import preset
from smkern.profile import Profile


def read_own(path: Path, model: str, profile: Profile) -> TablePredictor:
    """The predictor of a table, for replays of a model.

    Args:
        path: What `smkern bench latency-table` wrote.
        model: A preset's name.
        profile: The device that serves.

    Raises:
        TableError: no valid table, one of another GPU, or of a model of other sizes.
    """
    predictor = TablePredictor.read(path, profile)
    if predictor.sizes != ModelSizes.of(preset(model)):
        timed = read_timings(path)[0].meta.get("model")
        raise TableError(
            f"{path} has the times of {timed!r}, whose sizes are not those of {model!r}: give "
            f"--model {timed}, or a table of {model}, which smkern profile --model {model} and "
            "smkern bench latency-table make"
        )
    return predictor


def note_table(results: Results, path: Path | None) -> None:
    """Note in a results file which table timed its replays.

    Raises:
        UsageError: the cells that it has were timed by another.
    """
    named = path and f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    known = results.meta.get("table")
    if results.cells and known != named:
        raise click.UsageError(
            f"its replays were timed by {known or 'the shipped table'}, not by "
            f"{named or 'that'}: name another file with --out"
        )
    if named:
        results.meta["table"] = named
