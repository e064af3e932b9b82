"""`smkern bench readme`: fill the tables of README.md and bench/results/README.md.

A block lies between `<!-- name -->` and `<!-- /name -->`; what is between them is replaced. The
same results give the same text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from smkern.bench.results import COMMITTED, FOLDER, Results, load_results
from smkern.bench.tables import gemm, models, operators, overview, runtime
from smkern.bench.tables.markdown import NOT_MEASURED
from smkern.errors import SmkernError

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", FOLDER / "README.md")

TABLES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], str]]] = {
    "why": ("gemm", gemm.why_table),
    "gemm-table": ("gemm", gemm.ratio_tables),
    "gemm-rates": ("gemm", gemm.rates_table),
    "gemm-losing": ("gemm", gemm.losing_table),
    "untuned-table": ("untuned", gemm.untuned_table),
    "partition-table": ("partitions", operators.bandwidth_table),
    "attention-decode": ("attention", operators.decode_rates_table),
    "attention-prefill": ("attention", operators.prefill_rates_table),
    "attention-ratios": ("attention", operators.attention_ratios_table),
    "attention-plan": ("attention", operators.plan_table),
    "append-table": ("append", operators.append_table),
    "ops-table": ("ops", operators.ops_table),
    "ops-sample": ("ops", operators.sample_table),
    "model-decode": ("model", models.decode_table),
    "model-prefill": ("model", models.prefill_table),
    "model-breakdown": ("model", models.breakdown_table),
    "autotune-table": ("autotune", models.autotune_table),
    "runtime-gains": ("runtime", runtime.gains_table),
    "runtime-steady": ("runtime", runtime.steady_table),
    "runtime-costs": ("runtime", runtime.costs_table),
    "runtime-ablation": ("runtime", runtime.ablation_table),
    "runtime-served": ("runtime", runtime.served_table),
}
"""Block to the suite whose cells it shows, and how."""
SUMMARIES: dict[str, tuple[str, Callable[[Results], str]]] = {
    "left-out-table": ("left_out", gemm.left_out_table),
    "steps-table": ("steps", models.steps_table),
}
"""The same of blocks that show a suite's summary, too."""
OVERVIEWS: dict[str, Callable[[overview.Suites], str]] = {
    "headline": overview.headline,
    "suites": overview.suites_table,
    "targets": overview.targets_table,
    "provenance": overview.provenance_table,
}
PICTURES = {
    "gemm-plot": "gemm-m*.png",
    "cliffs-plot": "cliffs*.png",
    "partition-plot": "partition*.png",
    "attention-plot": "attention-*.png",
    "append-plot": "append*.png",
    "ops-plot": "ops*.png",
    "model-plot": "model*.png",
    "runtime-plot": "runtime*.png",
}


class ReadmeError(SmkernError, ValueError):
    """Pages whose blocks do not match what there is to fill in."""


def fill(pages: Sequence[str], blocks: Mapping[str, str]) -> list[str]:
    """The pages with each block's content replaced.

    Raises:
        ReadmeError: a block is not on the pages exactly once, is not closed, or is unknown.
    """
    found = Counter[str]()

    def replaced(match: re.Match[str]) -> str:
        name = match[1]
        found[name] += 1
        return f"<!-- {name} -->\n\n{blocks.get(name, '').strip()}\n\n<!-- /{name} -->"

    block = re.compile(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->", re.DOTALL)
    filled = [block.sub(replaced, page) for page in pages]
    for name in (*blocks, *found):
        if name not in blocks or found[name] != 1:
            raise ReadmeError(
                f"block {name!r} is {found[name]} times on the pages, and "
                f"{'known' if name in blocks else 'unknown'}: of each known block they need "
                f"<!-- {name} --> and <!-- /{name} --> once, and of others none"
            )
    return filled


def blocks_of(folder: Path) -> dict[str, str]:
    """Every block's content, from the results files in `folder`."""
    suites = {path.stem: load_results(path) for path in sorted(folder.glob("*.json"))}
    none = Results()
    return {
        **{name: table(suites.get(of, none).cells) for name, (of, table) in TABLES.items()},
        **{name: table(suites.get(of, none)) for name, (of, table) in SUMMARIES.items()},
        **{name: table(suites) for name, table in OVERVIEWS.items()},
        **{name: _pictures(folder, pattern) for name, pattern in PICTURES.items()},
    }


def _pictures(folder: Path, pattern: str) -> str:
    """The folder's pictures of that name, by paths from the page beside the folder."""
    paths = sorted(folder.glob(pattern), key=_by_number)
    return "\n".join(f"![{p.stem}]({p.parent.name}/{p.name})" for p in paths) or NOT_MEASURED


def _by_number(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.name)
    return (int(digits[-1]) if digits else 0, path.name)


@click.command("readme")
@click.option(
    "--page", "pages", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True, default=PAGES, help="To fill; once for each page.",
)  # fmt: skip
@click.option("--results", type=click.Path(path_type=Path), default=FOLDER / COMMITTED)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a page is out of date.")
def command(pages: tuple[Path, ...], results: Path, check: bool) -> None:
    """Fill the tables of README.md and bench/results/README.md from the committed results."""
    old = [page.read_text(encoding="utf-8") for page in pages]
    stale = [
        (page, new)
        for page, before, new in zip(pages, old, fill(old, blocks_of(results)), strict=True)
        if new != before
    ]
    if check and stale:
        names = ", ".join(str(page) for page, _ in stale)
        raise click.ClickException(f"{names}: out of date; run: make readme")
    for page, new in stale:
        page.write_text(new, encoding="utf-8")
    click.echo(f"{len(stale)} of {len(pages)} pages rewritten" if stale else "up to date")


if __name__ == "__main__":
    command()
