"""`smkern bench latency-errors`: how far each latency model is from launches that were held out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from smkern.bench.results import COMMITTED, FOLDER, JsonDict, open_results
from smkern.bench.rows import grouped
from smkern.device import gpu_folder
from smkern.errors import SmkernError
from smkern.latency.accuracy import (
    Accuracy,
    LearningPoint,
    error_table,
    format_table,
    learning_curve,
)
from smkern.latency.models import MODELS, Factory, models_with
from smkern.latency.predictor import Predictor
from smkern.latency.profile_file import read_profile
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.profile import Profile, load_profile
from smkern.tuning.cells import PROVENANCE

OP = "latency"
OURS = {"table": "smkern"}
"""Names of our own models, as providers."""
COUNTS = (25, 50, 100, 200, 400)
"""Samples of a learning curve, as far as there are so many; all of them in the end."""
SEEDS = (0, 1, 2)


def fitted(
    factories: Mapping[str, Factory],
    samples: Sequence[Sample],
    sizes: ModelSizes,
    profile: Profile,
) -> tuple[dict[str, Predictor], dict[str, str]]:
    """The models that samples determine, and why the others are none."""
    models: dict[str, Predictor] = {}
    refused: dict[str, str] = {}
    for name, make in factories.items():
        try:
            models[name] = make(samples, sizes, profile)
        except SmkernError as error:
            refused[name] = str(error)
    return models, refused


def error_cells(model: str, table: Mapping[str, Accuracy]) -> Iterator[JsonDict]:
    """A cell for each figure of each latency model, with the errors by kind beside it."""
    for name, found in table.items():
        for figure, value in found.figures().items():
            kinds = found.beside if figure.startswith("beside") else found.solo
            cell: JsonDict = {
                "op": OP,
                "case": {"model": model, "name": figure},
                "provider": OURS.get(name, name),
                "value": round(value, 5),
                "unit": "fraction",
            }
            if not figure.startswith("guard"):
                cell["by_kind"] = {
                    kind: {key: round(x, 5) for key, x in asdict(errors).items()}
                    for kind, errors in kinds.items()
                    if errors.launches
                }
            yield cell | ({"refused": found.refused} if found.refused else {})


def curve_cells(model: str, points: Sequence[LearningPoint]) -> Iterator[JsonDict]:
    """A cell for each latency model and number of samples: mean errors over the draws."""
    groups = grouped(points, lambda point: (point.model, point.num_samples))
    for (name, count), group in groups.items():
        for figure in ("solo_mape", "beside_mape"):
            found = [p.accuracy.figures() for p in group if p.accuracy is not None]
            values = [figures[figure] for figures in found if figure in figures]
            if values:
                yield {
                    "op": OP,
                    "case": {"model": model, "name": f"{figure}_by_samples", "samples": count},
                    "provider": OURS.get(name, name),
                    "value": round(sum(values) / len(values), 5),
                    "unit": "fraction",
                    "draws": [round(value, 5) for value in values],
                    "not_fitted": len(group) - len(found),
                }


@click.command("latency-errors")
@click.argument("profiles", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Results file; a model's cells in it are replaced, those of others stay.",
)
def command(profiles: tuple[Path, ...], out: Path | None) -> None:
    """Errors of every latency model on the held-out launches of PROFILES, and over samples.

    PROFILES are files of `smkern profile`; without any, those that the checkout has of an H200.
    """
    files = profiles or tuple(sorted((FOLDER / COMMITTED).glob("*.profile.jsonl")))
    if not files:
        raise click.UsageError(f"no *.profile.jsonl in {FOLDER / COMMITTED}: name the files")
    for path in files:
        meta, cells = judge(path)
        if out is not None:
            save(out, meta, cells)
            click.echo(f"{len(cells)} cells in {out}")


def save(path: Path, meta: JsonDict, cells: Sequence[JsonDict]) -> None:
    """Put a model's cells in place of all that a file has of it: another profile of the model had
    other numbers of samples."""
    results = open_results(path, resume=True, meta=meta)
    model = cells[0]["case"]["model"]
    results.drop(lambda cell: cell["case"]["model"] == model)
    for cell in cells:
        results.add(cell)
    results.save(path)


def judge(path: Path) -> tuple[JsonDict, list[JsonDict]]:
    """Fit to a profile, print errors on what it held out; its provenance, and the cells.

    Raises:
        TableError: the file is no profile.
        ProfileError: no ceilings of its GPU.
    """
    measured = read_profile(path)
    model, gpu, sizes = str(measured.meta.get("model")), measured.gpu, measured.sizes
    profile = load_profile(gpu_folder(gpu))
    samples, held_out = measured.fitted, measured.held_out
    factories = models_with(measured.gemms)
    models, refused = fitted(factories, samples, sizes, profile)
    table = error_table(models, held_out)
    click.echo(f"{model} on {gpu}: fitted to {len(samples)} launches, judged by {len(held_out)}")
    click.echo(format_table(table))
    for name, reason in refused.items():
        click.echo(f"{name} was not fitted: {reason}")
    counts = [count for count in COUNTS if count < len(samples)] + [len(samples)]
    points = learning_curve(
        factories, samples, held_out, sizes, profile, counts=counts, seeds=SEEDS
    )
    cells = [*error_cells(model, table), *curve_cells(model, points)]
    for name in MODELS:
        click.echo(f"{name:22}" + _curve_line(cells, OURS.get(name, name), counts))
    about = {key: measured.meta[key] for key in PROVENANCE if key in measured.meta}
    return about, cells


def _curve_line(cells: Sequence[JsonDict], provider: str, counts: Sequence[int]) -> str:
    """Mean errors alone and beside a neighbour, in percent, by the number of samples."""
    found = {
        (cell["case"]["name"], cell["case"]["samples"]): 100 * cell["value"]
        for cell in cells
        if cell["provider"] == provider and "samples" in cell["case"]
    }
    words = []
    for count in counts:
        solo = found.get(("solo_mape_by_samples", count))
        beside = found.get(("beside_mape_by_samples", count))
        shown = [f"{value:.1f}" if value is not None else "-" for value in (solo, beside)]
        words.append(f"{count}: {' / '.join(shown)}")
    return "   ".join(words)
