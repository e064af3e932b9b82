"""`smkern bench readme`: fill the README's tables from committed results.

A block lies between `<!-- name -->` and `<!-- /name -->`; what is between them is replaced. The
same results give the same text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from smkern.bench.markdown import NOT_MEASURED, markdown_table
from smkern.bench.readme_append import append_table
from smkern.bench.readme_attention import plan_table, rates_table, ratios_table
from smkern.bench.readme_model import breakdown_table, decode_table, prefill_table
from smkern.bench.readme_ops import ops_table, sample_table
from smkern.bench.readme_runtime import (
    ablation_table,
    costs_table,
    gains_table,
    served_table,
    steady_table,
)
from smkern.bench.readme_untuned import (
    autotune_table,
    left_out_table,
    steps_table,
    untuned_table,
)
from smkern.bench.results import COMMITTED, FOLDER, Results, load_results
from smkern.bench.summary import WORST_TARGET, settled_ratio
from smkern.errors import SmkernError
from smkern.measure.timing import geomean

Cell = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
RATE_CASES = ((64, 28672, 4096), (512, 6144, 4096), (2048, 6144, 4096), (2048, 4096, 14336))
RATE_LABELS = {"smkern": "smkern", "cublas": "cuBLAS"}
READ_COUNTS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64)
READ_LABELS = {
    "smkern": "smkern",
    "driver": "the driver's own groups of 8",
    "flashinfer-way": "FlashInfer's way",
    "torch": "torch's green contexts",
}
OTHER_ORDERS = "best of the other orders tried"
PROVIDERS = {"smkern": "as dispatched", "smkern:triton": "our own kernels only"}


class ReadmeError(SmkernError, ValueError):
    """A README whose blocks do not match what there is to fill in."""


def fill(text: str, blocks: Mapping[str, str]) -> str:
    """`text` with each block's content replaced.

    Raises:
        ReadmeError: a block is not in the text exactly once, or is not closed.
    """
    for name, content in blocks.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        block = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        filled = f"{begin}\n{content.strip()}\n\n{end}"
        parts = block.split(text)
        count, text = len(parts) - 1, filled.join(parts)
        if count != 1:
            raise ReadmeError(
                f"block {name!r} is {count} times in the README; it needs <!-- {name} --> and "
                f"<!-- /{name} --> once"
            )
    return text


def blocks_of(folder: Path) -> dict[str, str]:
    """Every block's content, from the results files in `folder`."""
    suites = {path.stem: load_results(path) for path in sorted(folder.glob("*.json"))}
    gemm = suites.get("gemm", Results())
    attention = suites.get("attention", Results()).cells
    ops, model, runtime = (
        suites.get(name, Results()).cells for name in ("ops", "model", "runtime")
    )
    return {
        "gemm-table": _gemm_tables(gemm),
        "gemm-losing": _losing(gemm.cells),
        "gemm-rates": _rates_table(gemm.cells),
        "gemm-plot": _pictures(folder, "gemm-m*.png"),
        "attention-decode": rates_table(attention, "decode"),
        "attention-prefill": rates_table(attention, "prefill"),
        "attention-ratios": ratios_table(attention),
        "attention-plan": plan_table(attention),
        "attention-plot": _pictures(folder, "attention-*.png"),
        "append-table": append_table(suites.get("append", Results()).cells),
        "append-plot": _pictures(folder, "append*.png"),
        "ops-table": ops_table(ops),
        "ops-sample": sample_table(ops),
        "ops-plot": _pictures(folder, "ops*.png"),
        "model-decode": decode_table(model),
        "model-prefill": prefill_table(model),
        "model-breakdown": breakdown_table(model),
        "model-plot": _pictures(folder, "model*.png"),
        "untuned-table": untuned_table(suites.get("untuned", Results())),
        "left-out-table": left_out_table(suites.get("left_out", Results())),
        "steps-table": steps_table(suites.get("steps", Results())),
        "autotune-table": autotune_table(suites.get("autotune", Results())),
        "runtime-gains": gains_table(runtime),
        "runtime-steady": steady_table(runtime),
        "runtime-costs": costs_table(runtime),
        "runtime-ablation": ablation_table(runtime),
        "runtime-served": served_table(runtime),
        "runtime-plot": _pictures(folder, "runtime*.png"),
        "cliffs-plot": _pictures(folder, "cliffs*.png"),
        "partition-plot": _pictures(folder, "partition*.png"),
        "partition-table": _bandwidth_table(suites.get("partitions", Results()).cells),
        "targets": _targets(suites),
        "provenance": _provenance(suites),
    }


def _pictures(folder: Path, pattern: str) -> str:
    """The folder's pictures of that name, by a path that works where the README lies."""
    folder = folder.resolve()
    inside = folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder
    names = sorted((path.name for path in folder.glob(pattern)), key=_by_number)
    return "\n".join(f"![{Path(name).stem}]({inside / name})" for name in names) or NOT_MEASURED


def _by_number(name: str) -> tuple[int, str]:
    digits = re.findall(r"\d+", name)
    return (int(digits[-1]) if digits else 0, name)


def _gemm_tables(gemm: Results) -> str:
    parts = []
    for provider, label in PROVIDERS.items():
        cells = _compared(gemm.cells, provider)
        if cells:
            overall = geomean(settled_ratio(cell) for cell in cells)
            parts.append(
                f"**smkern, {label}, over cuBLAS**: geomean {overall:.3f} over {len(cells)} cells, "
                f"worst {min(settled_ratio(cell) for cell in cells):.2f}\n\n{_by_budget(cells)}"
            )
    return "\n\n".join(parts) or NOT_MEASURED


def _by_budget(cells: Sequence[Cell]) -> str:
    """Rows of M, columns of SM budgets: the geomean over the shapes."""
    budgets = sorted({cell["group_sms"] for cell in cells})
    found: dict[tuple[int, int], list[float]] = {}
    for cell in cells:
        found.setdefault((cell["case"]["m"], cell["group_sms"]), []).append(settled_ratio(cell))
    rows = [
        [str(m), *(_ratio(found.get((m, budget))) for budget in budgets)]
        for m in sorted({m for m, _ in found})
    ]
    total = [[c for c in cells if c["group_sms"] == budget] for budget in budgets]
    rows.append(["**all**", *(f"**{_ratio([settled_ratio(c) for c in t])}**" for t in total)])
    return markdown_table(["M \\ SMs", *map(str, budgets)], rows)


def _ratio(values: Sequence[float] | None) -> str:
    mean = geomean(values or ())
    return "" if mean is None else f"{mean:.2f}"


def _rates_table(cells: Iterable[Cell]) -> str:
    """TFLOP/s of a few cases: ours and cuBLAS in its better partition, over SM budgets."""
    rates: dict[tuple[int, int, int], dict[str, dict[int, float]]] = {}
    for cell in cells:
        case = tuple(cell["case"].get(name) for name in ("m", "n", "k"))
        if case in RATE_CASES and cell["provider"] in RATE_LABELS and cell.get("tflops"):
            by_budget = rates.setdefault(case, {}).setdefault(cell["provider"], {})
            budget = cell["group_sms"]
            by_budget[budget] = max(cell["tflops"], by_budget.get(budget, 0.0))
    if not rates:
        return NOT_MEASURED
    found = [by_budget for case in rates.values() for by_budget in case.values()]
    budgets = sorted({budget for by_budget in found for budget in by_budget})
    rows = [
        [f"{m} x {n} x {k}, {label}", *(_rate(rates[m, n, k][name], b) for b in budgets)]
        for m, n, k in RATE_CASES
        for name, label in RATE_LABELS.items()
        if name in rates.get((m, n, k), {})
    ]
    return markdown_table(["M x N x K \\ SMs", *map(str, budgets)], rows)


def _rate(by_budget: Mapping[int, float], budget: int) -> str:
    return f"{by_budget[budget]:.0f}" if budget in by_budget else ""


def _losing(cells: Iterable[Cell]) -> str:
    """Every cell below its limit in either of its two measurements."""
    cells = list(cells)
    if not any(_compared(cells, provider) for provider in PROVIDERS):
        return NOT_MEASURED
    rows = [row for provider in PROVIDERS for row in _losing_rows(_compared(cells, provider))]
    if not rows:
        return "No cell loses more than its limit."
    head = ["M x N x K", "SMs", "by", "limit", "first", "again", "configuration"]
    return markdown_table(head, rows)


def _losing_rows(cells: Sequence[Cell]) -> Iterator[list[str]]:
    for cell in sorted(cells, key=settled_ratio):
        limit, case = WORST_TARGET[cell["provider"]], cell["case"]
        again = cell.get("vs_cublas_again")
        if min(cell["vs_cublas"], settled_ratio(cell)) < limit:
            yield [
                f"{case['m']} x {case['n']} x {case['k']}",
                str(cell["group_sms"]),
                f"`{cell['provider']}`",
                f"{limit:.2f}",
                f"{cell['vs_cublas']:.3f}",
                "" if again is None else f"{again:.3f}",
                f"`{cell.get('config', '')}`",
            ]


def _compared(cells: Iterable[Cell], provider: str) -> list[Cell]:
    """The provider's GEMM cells that have a ratio to cuBLAS in the same partition."""
    return [
        cell
        for cell in cells
        if cell["op"] == "gemm"
        and cell["provider"] == provider
        and cell.get("vs_cublas") is not None
    ]


def _bandwidth_table(cells: Iterable[Cell]) -> str:
    """Read bandwidth in TB/s: who chose the SMs by rows, SM counts by columns."""
    found: dict[str, dict[int, float]] = {}
    for cell in cells:
        alone = cell["op"].startswith("read") and not cell["case"].get("beside")
        if alone and cell.get("tbps") and cell["num_sms"] in READ_COUNTS:
            label = READ_LABELS.get(cell["provider"], OTHER_ORDERS)
            best = found.setdefault(label, {})
            best[cell["num_sms"]] = max(cell["tbps"], best.get(cell["num_sms"], 0.0))
    if not found:
        return NOT_MEASURED
    counts = sorted({count for by_count in found.values() for count in by_count})
    rows = [
        [label, *(f"{found[label][n]:.2f}" if n in found[label] else "" for n in counts)]
        for label in (*READ_LABELS.values(), OTHER_ORDERS)
        if label in found
    ]
    return markdown_table(["SMs chosen by \\ how many", *map(str, counts)], rows)


def _targets(suites: Mapping[str, Results]) -> str:
    """Every row of every suite's summary that has a target."""
    rows = [
        [f"{suite}: {name}", _number(row["value"]), _number(row["target"]), _met(row.get("met"))]
        for suite, results in suites.items()
        for name, row in _target_rows(results.summary)
    ]
    return markdown_table(["what", "value", "target", ""], rows) if rows else NOT_MEASURED


def _target_rows(summary: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(summary, Mapping):
        return
    if "value" in summary and "target" in summary:
        yield prefix, summary
        return
    for name, part in summary.items():
        yield from _target_rows(part, f"{prefix} {name}".strip())


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value or "")


def _met(met: bool | None) -> str:
    return {True: "met", False: "**missed**", None: "not measured"}[met]


def _provenance(suites: Mapping[str, Results]) -> str:
    rows = []
    for suite, results in suites.items():
        meta = results.meta
        versions = [str(meta.get(name) or "?") for name in ("gpu", "driver", "torch", "triton")]
        date, commit = str(meta.get("date", "?"))[:10], str(meta.get("smkern_commit", "?"))
        rows.append([f"`{suite}.json`", *versions, date, f"`{commit}`", str(len(results.cells))])
    head = ["file", "GPU", "driver", "torch", "Triton", "date", "commit", "cells"]
    return markdown_table(head, rows) if rows else NOT_MEASURED


@click.command("readme")
@click.option("--readme", type=click.Path(path_type=Path), default=ROOT / "README.md")
@click.option("--results", type=click.Path(path_type=Path), default=FOLDER / COMMITTED)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if the README is out of date.")
def command(readme: Path, results: Path, check: bool) -> None:
    """Fill the README's tables from the committed results."""
    old = readme.read_text(encoding="utf-8")
    new = fill(old, blocks_of(results))
    if check and new != old:
        raise click.ClickException(f"{readme.name} is out of date; run: make readme")
    if new != old:
        readme.write_text(new, encoding="utf-8")
    click.echo(f"{readme.name} is {'up to date' if new == old else 'rewritten'}")


if __name__ == "__main__":
    command()
