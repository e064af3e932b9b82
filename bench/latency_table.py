"""`smkern bench latency-table`: fill the predictor's tables from committed figures of models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from smkern.bench.results import COMMITTED, FOLDER, Results, load_results
from smkern.bench.runtime.cases import MIXED, OP, OURS, STEADY, plans_named
from smkern.device import gpu_folder
from smkern.errors import SmkernError
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import Timing, latency_file
from smkern.models import preset
from smkern.tuning.cells import PROVENANCE

Cell = Mapping[str, Any]

SUITES = ("model", "runtime", "steps")
"""Results files that time launches of whole models; of two that time the same, the later counts."""
KINDS = {"decode_step": "decode", "prefill": "prefill", "mixed_step": "mixed"}
"""Operator of a cell to kind of a timing. A mixed step's case has the keys of both others."""
BESIDE = re.compile(r"(?P<kind>decode|prefill) (?P<batch>\d+)x\d+")


def timings_of(cells: Iterable[Cell], total_sms: int) -> dict[str, dict[Timing, float]]:
    """Timed launches by model, of kernels as they are dispatched on well-spread SMs.

    Args:
        cells: Cells of a results file; those of other operators and failed ones are passed over.
        total_sms: SMs of the device.
    """
    found: dict[str, dict[Timing, float]] = {}
    for cell in cells:
        if _counts(cell):
            timed = {_timing(cell, total_sms): float(cell["us"])}
        elif _is_ours(cell, MIXED):
            timed = dict([_forward(cell, total_sms)])
        elif _is_ours(cell, STEADY):
            timed = _steady(cell, total_sms)
        else:
            continue
        found.setdefault(cell["case"]["model"], {}).update(timed)
    return found


def _counts(cell: Cell) -> bool:
    return (
        cell["op"] in KINDS
        and cell["provider"] == OURS
        and cell.get("us") is not None
        and not cell.get("error")
        and cell["case"].get("overlap", True)
        and cell.get("placement", "spread") in ("spread", "full", None)
    )


def _timing(cell: Cell, total_sms: int) -> Timing:
    case, num_sms = cell["case"], cell["num_sms"]
    kind = KINDS[cell["op"]]
    decodes, prefills = kind != "prefill", kind != "decode"
    beside = BESIDE.fullmatch(case["beside"]) if case.get("beside") else None
    return Timing(
        kind=kind,  # type: ignore[arg-type]
        num_sms=num_sms,
        batch=case["batch"] if decodes else 0,
        context=case["context"] if decodes else 0,
        prompts=case.get("prompts", 1 if decodes else case["batch"]) if prefills else 0,
        tokens=case["tokens"] if prefills else 0,
        cached=case.get("cached", 0),
        beside_sms=cell.get("beside_sms", total_sms - num_sms) if beside else 0,
        beside_batch=int(beside["batch"]) if beside and beside["kind"] == "decode" else 0,
    )


def _is_ours(cell: Cell, name: str) -> bool:
    """Whether a cell is the runtime suite's, of that name and of our kernels."""
    return (
        cell["op"] == OP
        and cell["case"]["name"] == name
        and cell["provider"] == OURS
        and not cell.get("error")
    )


def _steady(cell: Cell, total_sms: int) -> dict[Timing, float]:
    """Both sides of a split that are never dry: the median step, alone too, and a prompt."""
    (plan,) = plans_named([cell["case"]["model"]])
    rung = cell["case"]["rung"]
    step = Timing("decode", rung, plan.batch, plan.context)
    prompt = Timing("prefill", total_sms - rung, prompts=1, tokens=plan.tokens)
    other = replace(prompt, beside_sms=rung, beside_batch=plan.batch, beside_context=plan.context)
    return {
        step: 1e3 * cell["alone_ms"],
        replace(step, beside_sms=total_sms - rung, beside_tokens=plan.tokens): (
            1e3 * cell["tbt_p50_ms"]
        ),
        other: 1e3 * plan.tokens / cell["tokens_per_ms"],
    }


def _forward(cell: Cell, total_sms: int) -> tuple[Timing, float]:
    """A mixed forward and its ms, with the chunk in the middle of its prompt, if timed there."""
    (plan,) = plans_named([cell["case"]["model"]])
    by_start = {int(start): ms for start, ms in cell["by_start_ms"].items()}
    middle = sorted(by_start)[len(by_start) // 2]
    timing = Timing(
        "mixed", total_sms, plan.batch, plan.context, 1, tokens=cell["chunk"], cached=middle
    )
    return timing, 1e3 * by_start[middle]


def write_tables(results: Results, folder: Path) -> list[Path]:
    """A file a model of `results`; cells that are there and not measured again stay.

    Args:
        results: Cells and their provenance.
        folder: Where a GPU's folder of tables is, or shall be.

    Raises:
        TableError: the results lack their provenance, or a file that is there is no table.
        ConfigError: a model that is no preset.
    """
    meta = {name: results.meta[name] for name in PROVENANCE if name in results.meta}
    gpu = str(meta.get("gpu"))
    paths = []
    for model, timings in sorted(timings_of(results.cells, results.meta["num_sms"]).items()):
        sizes = ModelSizes.of(preset(model)).to_json()
        path = folder / gpu_folder(gpu) / f"{model}.json"
        latency_file(path).merge(timings, meta | {"model": model, "sizes": sizes})
        paths.append(path)
    return paths


def committed(gpu: str = COMMITTED) -> list[Path]:
    """The results files in a GPU's folder that time launches of whole models: those that exist."""
    paths = [FOLDER / gpu / f"{suite}.json" for suite in SUITES]
    return [path for path in paths if path.exists()]


@click.command("latency-table")
@click.argument("results", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of tables; a folder a GPU is made in it.",
)
def command(results: tuple[Path, ...], out: Path) -> None:
    """Fill the predictor's tables, a file a model, from RESULTS of the model and runtime suites.

    Without RESULTS, from those that the checkout has of an H200. The tables that smkern ships with
    lie in smkern/latency/tables.
    """
    files = results or committed()
    if not files:
        raise click.UsageError(f"no results in {FOLDER / COMMITTED}: name the files")
    try:
        paths = [path for file in files for path in write_tables(load_results(file), out)]
    except SmkernError as error:
        raise click.ClickException(str(error)) from error
    for path in dict.fromkeys(paths):
        click.echo(path)


if __name__ == "__main__":
    command()
