"""Our GEMM over SM budgets: the plan for a GPU that may be absent; with a GPU, against cuBLAS.

`python examples/gemm_budgets.py [folder]`
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import smkern
from smkern.bench.results import Results
from smkern.device import Budget
from smkern.errors import DeviceError
from smkern.measure.provenance import collect_meta
from smkern.ops.gemm.dispatch import Explanation, offline_dispatcher
from smkern.profile import Profile
from smkern.tuning.config import STREAM_K, GemmConfig, GemmProblem
from smkern.tuning.select import GEMM_FAMILY

SHAPE = (6144, 4096)
"""(n, k) of an 8B model's QKV projection."""
MS = (64, 2048)
BUDGETS = (16, 32, 60, 84, 116, 132)


def plan_table(profile: Profile, ms: Sequence[int] = MS) -> Table:
    """What dispatch picks for each M and SM budget of a device that may be absent."""
    n, k = SHAPE
    name = profile.info.name
    dispatcher = offline_dispatcher(profile, GEMM_FAMILY.load(profile))
    table = Table(title=f"smkern.gemm, n {n}, k {k}, bf16, as planned for an {name}", box=None)
    for column in ("M", "SMs", "kernel", "tile", "K split", "waves", "us", "TFLOP/s", "chosen by"):
        left = column in ("kernel", "tile", "K split", "chosen by")
        table.add_column(column, justify="left" if left else "right")
    for m in ms:
        problem = GemmProblem(m, n, k)
        for num_sms in (count for count in BUDGETS if count <= profile.info.num_sms):
            budget = Budget(num_sms, "mask", clusters=num_sms > profile.info.num_sms // 2)
            found = dispatcher.explain(problem, budget)
            table.add_row(*_plan_row(found), end_section=num_sms == BUDGETS[-1])
    return table


def _plan_row(found: Explanation) -> list[str]:
    problem, config = found.problem, found.config
    rate = problem.flops / found.predicted_us / 1e6
    return [
        str(problem.m),
        str(found.budget.num_sms),
        config.kernel + (", swapped" if config.swap else ""),
        f"{config.block_m}x{config.block_n}x{config.block_k}",
        _split_name(config),
        f"{found.waves:.2f}",
        f"{found.predicted_us:.1f}",
        f"{rate:.0f}",
        found.source,
    ]


def _split_name(config: GemmConfig) -> str:
    return {1: "whole", STREAM_K: "stream-K"}.get(config.split, f"in {config.split}")


def measure(path: Path, ms: Sequence[int], budgets: Sequence[int]) -> Results:
    """A short GEMM benchmark inside partitions, written to `path`."""
    from smkern.bench.gemm import GemmChoice, gemm_groups
    from smkern.bench.suite import Output

    results = Results(meta=collect_meta())
    groups = gemm_groups((SHAPE,), tuple(ms), tuple(budgets))
    GemmChoice().suite().run(groups, results, Output(path), again=False)
    return results


def rates_table(results: Results) -> Table:
    """TFLOP/s by provider: rows of M and budget."""
    providers = {"smkern": "smkern", "cublas": "cuBLAS", "wrong-budget": "told all SMs"}
    best: dict[tuple[int, int], dict[str, float]] = {}
    for cell in results.cells:
        if cell["op"] == "gemm" and cell["provider"] in providers and cell.get("tflops"):
            row = best.setdefault((cell["case"]["m"], cell["group_sms"]), {})
            row[cell["provider"]] = max(cell["tflops"], row.get(cell["provider"], 0.0))
    table = Table(title="TFLOP/s inside the partition, cuBLAS in its better one", box=None)
    for column in ("M", "SMs", *providers.values(), "smkern / cuBLAS"):
        table.add_column(column, justify="right")
    for (m, num_sms), row in sorted(best.items()):
        figures = [f"{row[name]:.0f}" if name in row else "" for name in providers]
        ratio = row["smkern"] / row["cublas"] if row.keys() >= {"smkern", "cublas"} else None
        table.add_row(str(m), str(num_sms), *figures, "" if ratio is None else f"{ratio:.2f}")
    return table


def draw(console: Console, results: Results, out: Path) -> None:
    """TFLOP/s over SM budget: ours, cuBLAS and the ideal line."""
    from smkern.bench.plots import draw

    for path in draw("gemm", results, out):
        console.print(f"Picture: {path}")


def show(console: Console, out: Path, num_sms: int) -> None:
    """Measure inside partitions; print the table, draw the picture."""
    console.print("Our GEMM and cuBLAS inside partitions (compiles first, then measures) ...")
    results = measure(out / "gemm.json", MS, [count for count in BUDGETS if count <= num_sms])
    console.print(rates_table(results))
    draw(console, results, out)


def main(out: Path) -> None:
    """Measure on the GPU, or show the plan for an H200 where there is none."""
    try:
        num_sms = smkern.device_info().num_sms
    except DeviceError:
        Console().print(plan_table(smkern.load_profile()))
    else:
        show(Console(), out, num_sms)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
