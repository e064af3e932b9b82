"""`smkern bench readme`: fill the tables of the pages that show results.

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

from smkern.bench.results import COMMITTED, FOLDER, Results, load_results, reading
from smkern.bench.tables import (
    engines,
    gemm,
    latency,
    models,
    operators,
    overview,
    power,
    ranks,
    replay,
    runtime,
    server,
)
from smkern.bench.tables.markdown import NOT_MEASURED
from smkern.errors import SmkernError

H100 = "h100-80gb-hbm3"
ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", FOLDER / "README.md", ROOT / "docs" / "latency.md")

Suites = Mapping[str, Results]
Block = Callable[[Path, Suites], str]
"""What a block shows of a folder of results and of the suites in it."""


def _suites(folder: Path) -> Suites:
    return {path.stem: load_results(path) for path in sorted(folder.glob("*.json"))}


def _cells(suite: str, table: Callable[[list[dict[str, Any]]], str]) -> Block:
    return lambda folder, suites: table(suites.get(suite, Results()).cells)


def _suite(suite: str, table: Callable[[Results], str]) -> Block:
    return lambda folder, suites: table(suites.get(suite, Results()))


def _all(table: Callable[[Suites], str]) -> Block:
    return lambda folder, suites: table(suites)


def _beside(folder: Path, suites: Suites) -> str:
    """What the checkout's folders of other GPUs have beside this one."""
    others = sorted({path.parent for path in FOLDER.glob("*/*.json")} - {folder})
    return overview.gpus_table([suites, *map(_suites, others)])


def _of(gpu: str, block: Block) -> Block:
    """A block of another GPU's folder, beside this one."""
    return lambda folder, suites: block(folder.parent / gpu, _suites(folder.parent / gpu))


def _on_both(table: Callable[[list[latency.Gpu]], str]) -> Block:
    """A table of the latency cells of an H200 and an H100."""

    def block(folder: Path, suites: Suites) -> str:
        paths = {"H200": folder / "latency.json", "H100": folder.parent / H100 / "latency.json"}
        return table(
            [latency.Gpu(x, load_results(at).cells) for x, at in paths.items() if at.exists()]
        )

    return block


def _pictures(pattern: str) -> Block:
    """The folder's pictures of that name, by paths from the page beside the folder."""

    def block(folder: Path, suites: Suites) -> str:
        paths = sorted(folder.glob(pattern), key=_by_number)
        return "\n".join(f"![{p.stem}]({folder.name}/{p.name})" for p in paths) or NOT_MEASURED

    return block


def _by_number(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.name)
    return (int(digits[-1]) if digits else 0, path.name)


BLOCKS: dict[str, Block] = {
    "headline": _all(overview.headline),
    "suites": _all(overview.suites_table),
    "targets": _all(overview.targets_table),
    "provenance": _all(overview.provenance_table),
    "gpus": _beside,
    "partition-table": _cells("partitions", operators.bandwidth_table),
    "partition-plot": _pictures("partition*.png"),
    "why": _cells("gemm", gemm.why_table),
    "gemm-table": _cells("gemm", gemm.ratio_tables),
    "gemm-plot": _pictures("gemm-m*.png"),
    "gemm-rates": _cells("gemm", gemm.rates_table),
    "gemm-losing": _cells("gemm", gemm.losing_table),
    "cliffs-plot": _pictures("cliffs*.png"),
    "cutlass-table": _cells("cutlass", gemm.cutlass_table),
    "cutlass-cpp-table": _cells("cutlass", gemm.cutlass_cpp_table),
    "power-table": _cells("power", power.configurations_table),
    "fp8-table": _cells("fp8", gemm.fp8_table),
    "untuned-table": _cells("untuned", gemm.untuned_table),
    "left-out-table": _suite("left_out", gemm.left_out_table),
    "steps-table": _suite("steps", models.steps_table),
    "autotune-table": _cells("autotune", models.autotune_table),
    "attention-decode": _cells("attention", operators.decode_rates_table),
    "attention-prefill": _cells("attention", operators.prefill_rates_table),
    "attention-ratios": _cells("attention", operators.attention_ratios_table),
    "attention-plot": _pictures("attention-*.png"),
    "attention-plan": _cells("attention", operators.plan_table),
    "layouts-table": _cells("layouts", operators.attention_ratios_table),
    "layouts-table-h100": _of(H100, _cells("layouts", operators.attention_ratios_table)),
    "ops-table": _cells("ops", operators.ops_table),
    "ops-sample": _cells("ops", operators.sample_table),
    "ops-plot": _pictures("ops*.png"),
    "model-decode": _cells("model", models.decode_table),
    "model-plot": _pictures("model*.png"),
    "model-prefill": _cells("model", models.prefill_table),
    "model-breakdown": _cells("model", models.breakdown_table),
    "runtime-gains": _cells("runtime", runtime.gains_table),
    "runtime-plot": _pictures("runtime*.png"),
    "runtime-steady": _cells("runtime", runtime.steady_table),
    "runtime-costs": _cells("runtime", runtime.costs_table),
    "runtime-ablation": _cells("runtime", runtime.ablation_table),
    "runtime-served": _cells("runtime", runtime.served_table),
    "runtime-served-h100": _of(H100, _cells("runtime", runtime.served_table)),
    "server-table": _cells("server", server.server_table),
    "soak-table": _cells("server", server.soak_table),
    "engines-table": _cells("engines", engines.engines_table),
    "engines-table-h100": _of(H100, _cells("engines", engines.engines_table)),
    "engines-alone": _cells("engines", engines.alone_table),
    "engines-alone-h100": _of(H100, _cells("engines", engines.alone_table)),
    "engines-window": _cells("engines", engines.window_table),
    "latency-models": _on_both(latency.models_table),
    "latency-ours": _on_both(latency.ours_table),
    "ranks-sums": _cells("ranks", ranks.sums_table),
    "ranks-forwards": _cells("ranks", ranks.forwards_table),
    "ranks-served": _cells("ranks", ranks.served_table),
    "ranks-counts": _cells("ranks", ranks.counts_table),
    "replay-goodput": _cells("replay", replay.goodput_table),
    "replay-orders": _cells("replay", replay.orders_table),
    "replay-kernels": _cells("replay", replay.kernels_table),
    "replay-paces": _cells("replay", replay.paces_table),
    "replay-paces-h100": _of(H100, _cells("replay", replay.paces_table)),
    "replay-confirmed": _cells("replay", replay.confirmed_table),
    "replay-real": _cells("replay", replay.real_table),
    "replay-ablations": _cells("replay_ablations", replay.ablations_table),
    "replay-plot": _pictures("replay-goodput*.png"),
}
"""Every block of the pages: from the results to its text."""


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
    suites = _suites(folder)
    with reading(folder):
        return {name: block(folder, suites) for name, block in BLOCKS.items()}


@click.command("readme")
@click.option(
    "--page", "pages", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True, default=PAGES, help="To fill; once for each page.",
)  # fmt: skip
@click.option("--results", type=click.Path(path_type=Path), default=FOLDER / COMMITTED)
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a page is out of date.")
def command(pages: tuple[Path, ...], results: Path, check: bool) -> None:
    """Fill the tables of the pages that show results from the committed ones."""
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
