"""`smkern bench cutlass`: GEMMs in CUTLASS's Python DSL against our Triton and Gluon, and cuBLAS.

Rows between the powers of two are where Triton's tiles leave most to gain. It needs the extra
`cutlass`, or the cubins of `smkern build`; after `smkern build --cpp` CUTLASS's C++ ones take part.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from smkern.bench.cases import there
from smkern.bench.cutlass_cpp import PROVIDER, CutlassBench
from smkern.bench.gemm import GemmChoice, gemm_groups
from smkern.bench.gemm_rows import TFLOPS_PER_SM, by_problem, settled_ratio
from smkern.bench.rows import Cell, geomean_row
from smkern.bench.suite import GEMM_OPTIONS, TIME_LIMIT_OPTION, Output, conclude, suite_command
from smkern.kernels.cute.cpp import load
from smkern.kernels.cute.cpp_build import built
from smkern.measure.gemm import BUDGETS, SHAPES

BACKENDS: dict[str, str | None] = {
    "smkern": None,
    "smkern:triton": "own",
    "smkern:cutlass": "cutlass",
}
ROWS = (64, 72, 77, 96, 136, 144, 200, 256, 512, 1000, 1024, 2048, 3001, 4096)
FEW_SMS = 60
BETWEEN = (65, 255)
"""Rows of decode batches that are no power of two."""

Groups = list[dict[str, Cell]]


def groups_of(cells: Iterable[Cell]) -> Groups:
    """The cells of all backends, and of `PROVIDER` where it took part, by problem and budget.

    Those that lack a backend are left out.
    """
    ours = by_problem(c for c in cells if c["provider"] in (*BACKENDS, PROVIDER))
    return [group for group in ours if BACKENDS.keys() <= group.keys()]


def over_triton(group: dict[str, Cell], provider: str = "smkern:cutlass") -> float:
    """How much faster than our Triton and Gluon kernels as tuned."""
    return float(group["smkern:triton"]["us"] / group[provider]["us"])


def over_cublas(group: dict[str, Cell], provider: str = "smkern:cutlass") -> float | None:
    """How much faster than cuBLAS in its better place; None where it cannot run."""
    cell = group[provider]
    return settled_ratio(cell) if cell.get("vs_cublas") else None


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """CUTLASS's kernels wherever they run, and what dispatch made of them."""
    groups = groups_of(cells)
    parts = [g for g in groups if g["smkern"]["mode"] != "full"]
    whole = [g for g in groups if g["smkern"]["mode"] == "full"]
    few = [g for g in parts if g["smkern"]["num_sms"] <= FEW_SMS]
    between = [g for g in few if BETWEEN[0] <= g["smkern"]["case"]["m"] <= BETWEEN[1]]
    tensor = [
        g["smkern:cutlass"]["tflops"] / (TFLOPS_PER_SM * g["smkern"]["num_sms"])
        for g in few
        if g["smkern"]["case"]["m"] >= 2048
    ]
    chosen = [g for g in groups if g["smkern"]["config"].startswith("cutlass")]
    dispatched = [value for g in groups if (value := over_cublas(g, "smkern")) is not None]
    return {
        "cutlass_over_triton": geomean_row(map(over_triton, parts), 1.0),
        "cutlass_over_triton_whole_chip": geomean_row(map(over_triton, whole), 1.0),
        "cutlass_over_triton_65_to_255_rows": geomean_row(map(over_triton, between), 1.2),
        "cutlass_tensor_fraction_m2048_up_to_60_sms": geomean_row(tensor, 0.86),
        "cutlass_chosen_over_triton": geomean_row((over_triton(g, "smkern") for g in chosen), 1.05),
        "cutlass_dispatched_over_cublas": geomean_row(dispatched, 1.14),
        **_yardstick([group for group in groups if PROVIDER in group]),
    }


def _yardstick(groups: Groups) -> dict[str, Any]:
    """CUTLASS's C++ kernels over ours as dispatched, and with clusters over without."""
    rows = {}
    for name, is_whole in (("", False), ("_whole_chip", True)):
        found = [g for g in groups if (g[PROVIDER]["mode"] == "full") is is_whole]
        both = [g[PROVIDER]["clusters_over_none"] for g in found]
        if found:
            ours = (g["smkern"]["us"] / g[PROVIDER]["us"] for g in found)
            rows[f"cutlass_cpp_over_dispatched{name}"] = geomean_row(ours)
            rows[f"cutlass_cpp_clusters_over_none{name}"] = geomean_row(filter(None, both))
    return rows


@suite_command("cutlass", *GEMM_OPTIONS, TIME_LIMIT_OPTION)
def command(output: Output, *, shapes: Any, ms: Any, budgets: Any) -> None:
    """Time CUTLASS's kernels, ours in Triton and Gluon, what dispatch takes, and cuBLAS.

    After `smkern build --cpp` CUTLASS's C++ GEMMs, too, the fastest variant of each cell. All in
    the same partitions, interleaved; cuBLAS also in the driver's own, and the better counts.
    """
    groups = gemm_groups(shapes or SHAPES, ms or ROWS, budgets or there(BUDGETS))
    bench = partial(CutlassBench.of, cpp=load() if built() else None)
    suite = GemmChoice(BACKENDS, context=False, bench=bench).suite(summarize, limits={})
    results = output.open()
    conclude(results, output.path, suite.run(groups, results, output, again=False))
