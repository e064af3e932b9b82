"""`smkern bench plot`: pictures of the results files, one picture an operator and row count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click

from smkern.bench.plots import models, operators, replay
from smkern.bench.results import COMMITTED, Results, load_results, reading, results_folder
from smkern.device import has_gpu
from smkern.panels import Picture, write

PICTURES: dict[str, Callable[[Results], Iterable[Picture]]] = {
    "gemm": operators.gemm,
    "attention": operators.attention,
    "ops": operators.ops,
    "model": models.model,
    "runtime": models.runtime,
    "replay": replay.pictures,
    "cliffs": operators.cliffs,
    "partitions": operators.partitions,
}
"""Suite to the pictures of its results file."""


def draw(suite: str, results: Results, folder: Path) -> list[Path]:
    """Write a suite's pictures into `folder`; none where nothing was measured."""
    return [write(picture, folder) for picture in PICTURES[suite](results)]


def draw_all(folder: Path, out: Path) -> Iterator[Path]:
    """Draw every results file in `folder` that has pictures, into `out`."""
    for suite in PICTURES:
        path = folder / f"{suite}.json"
        if path.exists():
            with reading(path):
                pictures = draw(suite, load_results(path), out)
            yield from pictures


def _default_folder() -> Path:
    """This GPU's results; without one, the committed ones that the README shows."""
    return results_folder() if has_gpu() else Path("bench") / "results" / COMMITTED


@click.command("plot")
@click.option(
    "--results",
    "folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=_default_folder,
    show_default=f"bench/results/<this GPU>, without one {COMMITTED}",
    help="Folder of results files.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder of pictures.")
def command(folder: Path, out: Path | None) -> None:
    """Draw throughput over SM budget: ours, the peers' and the ideal line."""
    pictures = list(draw_all(folder, out or folder))
    for picture in pictures:
        click.echo(str(picture))
    if not pictures:
        click.echo(f"no results in {folder}; measure with smkern bench gemm")
