"""Decide a table again from what the tuner measured, without a GPU.

`python -m smkern.autotune.rebuild raw.jsonl --out gemm.json` applies today's rule of choice
(`gemm.best_cell`) to every cell of a raw file; the table keeps its provenance.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from smkern.autotune import raw
from smkern.autotune.gemm import best_cell
from smkern.tuning import constraints
from smkern.tuning.select import GEMM_FAMILY
from smkern.tuning.table import Cell, CellKey

GAIN = 0.98
"""How much faster a smaller budget must have been to be copied."""


def cells_of(measurements: list[raw.GemmMeasurement]) -> dict[CellKey, Cell]:
    """The cells that these measurements make; of one configuration the newest counts."""
    newest: dict[CellKey, dict[object, raw.GemmMeasurement]] = {}
    for item in measurements:
        newest.setdefault(CellKey.of(item.problem, item.budget), {})[item.config] = item
    chosen = {key: best_cell(list(of_cell.values())) for key, of_cell in newest.items()}
    return {key: cell for key, cell in chosen.items() if cell is not None}


def never_slower(cells: dict[CellKey, Cell]) -> dict[CellKey, Cell]:
    """The same cells, where a larger budget runs as a smaller one did if that was faster.

    A budget is a maximum: with as many CTAs as the smaller partition had, a larger one is no
    slower. Waves that do not divide make such cells (2048x4096x14336 has them from 102 to 124).
    """
    found = dict(cells)
    best: dict[tuple[object, ...], tuple[CellKey, Cell]] = {}
    for key in sorted(cells, key=lambda key: key.num_sms):
        series = (key.op, key.m, key.n, key.k, key.dtype, key.epilogue, key.confined)
        cell = found[key]
        if series in best and best[series][1].own_us < GAIN * cell.own_us:
            smaller, faster = best[series]
            most = smaller.num_sms * (faster.own.ctas_per_sm if key.confined == "mask" else 1)
            own = replace(faster.own, max_ctas=min(faster.own.max_ctas or most, most))
            keep = cell.config.kernel in constraints.LIBRARIES and cell.us < faster.own_us
            config, us = (cell.config, cell.us) if keep else (own, faster.own_us)
            cell = found[key] = Cell(config, us, own, faster.own_us)
        if series not in best or cell.own_us < best[series][1].own_us:
            best[series] = (key, cell)
    return found


@click.command(help=__doc__)
@click.argument("raw_path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--contended/--alone", default=False, help="Which of the raw file's cells.")
def command(raw_path: Path, out: Path, contended: bool) -> None:
    store = GEMM_FAMILY.file(out)
    meta = store.load().meta
    if not meta:
        raise click.UsageError(f"{out} is no tuned table: its provenance is needed")
    measured = [item for item in raw.load(raw_path) if item.contended == contended]
    cells = never_slower(cells_of(measured))
    store.merge(cells, meta)
    click.echo(f"{len(cells)} cells decided again in {out}")


if __name__ == "__main__":
    command()
