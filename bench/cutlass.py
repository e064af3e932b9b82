"""`smkern bench cutlass`: GEMMs in CUTLASS's Python DSL against our Triton and Gluon, and cuBLAS.

Rows between the powers of two are where Triton's tiles leave most to gain. It needs the extra
`cutlass`, or the cubins of `smkern build`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.gemm import GemmChoice, gemm_groups
from smkern.bench.gemm_rows import settled_ratio
from smkern.bench.rows import target_row
from smkern.bench.suite import GEMM_OPTIONS, TIME_LIMIT_OPTION, Output, conclude, suite_command
from smkern.device import device_info
from smkern.measure.gemm import BUDGETS, SHAPES
from smkern.measure.timing import geomean

Cell = dict[str, Any]

BACKENDS: dict[str, str | None] = {
    "smkern": None,
    "smkern:triton": "own",
    "smkern:cutlass": "cutlass",
}
ROWS = (64, 72, 77, 96, 136, 144, 200, 256, 512, 1000, 1024, 2048, 3001, 4096)
BANDS = {"64": (64, 64), "65 to 255": (65, 255), "256 to 1024": (256, 1024), "above": (1025, 8192)}


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """Ratios by rows of a, on partitions and on the whole chip, and what dispatch chose."""
    by: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for cell in cells:
        if cell.get("us") and cell["provider"] in BACKENDS:
            case = cell["case"]
            key = case["m"], case["n"], case["k"], cell["num_sms"]
            by.setdefault(key, {})[cell["provider"]] = cell
    groups = [group for group in by.values() if len(group) == len(BACKENDS)]
    chosen = [g for g in groups if g["smkern"]["config"].startswith("cutlass")]
    return {
        "over_triton": _bands(groups, "smkern:cutlass", _over_triton),
        "over_cublas": _bands(groups, "smkern:cutlass", _over_cublas),
        "triton_over_cublas": _bands(groups, "smkern:triton", _over_cublas),
        "chosen_over_triton": _row([_over_triton(g, "smkern") for g in chosen]),
        "dispatched_over_cublas": _row([x for g in groups if (x := _over_cublas(g, "smkern"))]),
    }


def _over_triton(group: dict[str, Cell], provider: str) -> float:
    return float(group["smkern:triton"]["us"] / group[provider]["us"])


def _over_cublas(group: dict[str, Cell], provider: str) -> float | None:
    cell = group[provider]
    return settled_ratio(cell) if cell.get("vs_cublas") else None


def _bands(groups: list[dict[str, Cell]], provider: str, ratio: Any) -> dict[str, Any]:
    found = {}
    for where in ("partitions", "whole"):
        for band, (least, most) in BANDS.items():
            ratios = [
                value
                for group in groups
                if least <= group[provider]["case"]["m"] <= most
                and (group[provider]["mode"] == "full") == (where == "whole")
                and (value := ratio(group, provider)) is not None
            ]
            found[f"{where}, M {band}"] = _row(ratios)
    return found


def _row(ratios: list[float]) -> dict[str, Any]:
    row = target_row(geomean(ratios), 1.0, len(ratios))
    return row | {"worst": round(min(ratios), 4), "best": round(max(ratios), 4)} if ratios else row


@suite_command("cutlass", *GEMM_OPTIONS, TIME_LIMIT_OPTION)
def command(output: Output, *, shapes: Any, ms: Any, budgets: Any) -> None:
    """Time CUTLASS's kernels, ours in Triton and Gluon, what dispatch takes, and cuBLAS.

    All in the same partitions, interleaved; cuBLAS also in the driver's own, and the better counts.
    """
    total = device_info().num_sms
    groups = gemm_groups(
        shapes or SHAPES, ms or ROWS, budgets or tuple(n for n in BUDGETS if n <= total)
    )
    suite = GemmChoice(BACKENDS, context=False).suite(summarize, limits={})
    results = output.open()
    conclude(results, output.path, suite.run(groups, results, output, again=False))


if __name__ == "__main__":
    command()
