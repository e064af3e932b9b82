"""`smkern bench plot`: pictures of the results files, one picture an operator and row count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click

from smkern.bench.plots import append, attention, cliffs, gemm, model, ops, partitions, runtime
from smkern.bench.results import COMMITTED, Results, load_results, results_folder
from smkern.device import has_gpu
from smkern.errors import SmkernError

DRAWERS: dict[str, Callable[[Results, Path], list[Path]]] = {
    "gemm": gemm.draw,
    "attention": attention.draw,
    "append": append.draw,
    "ops": ops.draw,
    "model": model.draw,
    "runtime": runtime.draw,
    "cliffs": cliffs.draw,
    "partitions": partitions.draw,
}
"""Suite to what draws its results file; draw(results, folder) returns the pictures it wrote."""


def draw_all(folder: Path, out: Path) -> Iterator[Path]:
    """Draw every results file in `folder` that has a drawer, into `out`."""
    for suite, draw in DRAWERS.items():
        path = folder / f"{suite}.json"
        if path.exists():
            yield from draw(load_results(path), out)


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
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Folder of pictures.")
def command(folder: Path, out: Path | None) -> None:
    """Draw throughput over SM budget: ours, the peers' and the ideal line."""
    try:
        pictures = list(draw_all(folder, out or folder))
    except SmkernError as error:
        raise click.ClickException(str(error)) from error
    for picture in pictures:
        click.echo(str(picture))
    if not pictures:
        click.echo(f"no results in {folder}; measure with smkern bench gemm")
