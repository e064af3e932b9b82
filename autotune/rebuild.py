"""Decide a table again from what the tuner measured, without a GPU.

`python -m smkern.autotune.rebuild raw.jsonl --out gemm.json` applies today's rule of choice
(`measure.best_cell`) to every cell of a raw file; the table keeps its provenance.
"""

from __future__ import annotations

from pathlib import Path

import click

from smkern.autotune import raw
from smkern.autotune.measure import best_cell
from smkern.tuning.table import Cell, CellKey, TableStore


def cells_of(measurements: list[raw.Measurement]) -> dict[CellKey, Cell]:
    """The cells that these measurements make; of one configuration the newest counts."""
    newest: dict[CellKey, dict[object, raw.Measurement]] = {}
    for item in measurements:
        newest.setdefault(item.key, {})[item.config] = item
    chosen = {key: best_cell(list(of_cell.values())) for key, of_cell in newest.items()}
    return {key: cell for key, cell in chosen.items() if cell is not None}


@click.command(help=__doc__)
@click.argument("raw_path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--contended/--alone", default=False, help="Which of the raw file's cells.")
def command(raw_path: Path, out: Path, contended: bool) -> None:
    store = TableStore(out)
    meta = store.load().meta
    if not meta:
        raise click.UsageError(f"{out} is no tuned table: its provenance is needed")
    measured = [item for item in raw.load(raw_path) if item.contended == contended]
    cells = cells_of(measured)
    store.merge(cells, meta)
    click.echo(f"{len(cells)} cells decided again in {out}")


if __name__ == "__main__":
    command()
