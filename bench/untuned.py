"""`smkern bench untuned`: the cost model alone, on shapes that no table holds and no fit has seen.

What most users run first is a model that nobody tuned, in budgets that nobody tuned. With
`--left-out` the committed shapes instead, each by constants that were fitted without it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from smkern.bench.cases import Group, there
from smkern.bench.frame import GroupSuite
from smkern.bench.gemm import GemmChoice, gemm_groups
from smkern.bench.gemm_providers import GemmCase
from smkern.bench.gemm_rows import by_problem, compared, settled_ratio
from smkern.bench.rows import Cell, geomean, target_row
from smkern.bench.suite import AGAIN_OPTION, TIME_LIMIT_OPTION, Output, conclude, suite_command
from smkern.device import device_info
from smkern.errors import TableError
from smkern.measure.compiling import dispatcher_of
from smkern.measure.gemm import BUDGETS, Shape
from smkern.profile import load_profile
from smkern.tuning.cells import shipped_path
from smkern.tuning.cost_constants import CostConstants, read_constants
from smkern.tuning.select import GEMM_FAMILY

MODELS: Mapping[str, Mapping[str, Shape]] = {
    "mistral-7b, a quarter": {
        "qkv": (1536, 4096), "o": (4096, 1024), "gate_up": (7168, 4096), "down": (4096, 3584),
        "head": (8192, 4096),
    },
    "gemma-2-9b": {
        "qkv": (8192, 3584), "o": (3584, 4096), "gate_up": (28672, 3584), "down": (3584, 14336),
        "head": (256000, 3584),
    },
    "phi-4": {
        "qkv": (7680, 5120), "gate_up": (35840, 5120), "down": (5120, 17920),
        "head": (100352, 5120),
    },
    "qwen2.5-72b, a quarter": {
        "qkv": (2560, 8192), "o": (8192, 2048), "gate_up": (14784, 8192), "down": (8192, 7392),
        "head": (38016, 8192),
    },
}  # fmt: skip
"""Linear layers, (n, k). A quarter: tensor parallel over 4. Whole, Mistral's are Llama's. Phi-4's
output product is left out: it has the shape of half of Qwen3-32B's QKV product, which is tuned."""
ROWS = (1, 3, 17, 48, 77, 130, 200, 256, 391, 1000, 2500, 8192)
HEAD_ROWS = 256
"""A head runs on the rows that draw a token: no more than these."""
SEED = 12
DRAWS = 3
"""Budgets of each case, drawn from every second from 16 to two below the whole device."""
BACKENDS = {"smkern:model": "model", "smkern": None}
"""The model among the kernels that are always there; as dispatched, which is the same but where the
extra `cutlass` is there."""
ROWS_OF = {"smkern:model": "untuned", "smkern": "untuned_dispatched"}
"""Names of a provider's rows in the summary."""
LEFT_OUT = {"smkern:triton": "own", "smkern:model": "model"}
GEOMEAN, WORST, UNDER, SHARE_UNDER = 1.15, 0.90, 0.97, 0.05
LEFT_OUT_GEOMEAN, LEFT_OUT_WORST = 1.04, 1.15


def shapes() -> tuple[Shape, ...]:
    """The weights of all models, each shape once."""
    return tuple(dict.fromkeys(shape for model in MODELS.values() for shape in model.values()))


def untuned_groups(total: int) -> list[Group[GemmCase]]:
    """The cases with their drawn budgets, a shape after the other; the same on every run."""
    heads = {model["head"] for model in MODELS.values()}
    draw = random.Random(SEED)
    return [
        Group(GemmCase(m, n, k), num_sms)
        for n, k in shapes()
        for m in ROWS
        for num_sms in sorted(draw.sample(range(16, total, 2), DRAWS))
        if m <= HEAD_ROWS or (n, k) not in heads
    ]


def fitted_shapes(gpu: str) -> set[Shape]:
    """The weights that the shipped constants of this GPU were fitted to."""
    path = shipped_path(gpu, "cost_model")
    if not path.exists():
        return set()
    names = json.loads(path.read_text(encoding="utf-8"))["meta"]["weights"].split(",")
    return {(int(n), int(k)) for n, k in (name.split("x") for name in names)}


def check_unseen(wanted: Iterable[Shape], seen: Iterable[Shape], where: str) -> None:
    """Raise TableError where a shape was seen: it would not tell what an unknown one meets."""
    both = sorted(set(wanted) & set(seen))
    if both:
        names = ", ".join(f"{n}x{k}" for n, k in both)
        raise TableError(f"{where} has {names}, which this suite holds out: leave them out there")


def better_ratio(cell: Cell) -> float:
    """The better of a cell's measurements: what loses must lose in both."""
    return float(max(cell["vs_cublas"], cell.get("vs_cublas_again", 0.0)))


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """The rows of the model and of dispatch, and the model's worst cells."""
    found = by_provider(cells)
    rows: dict[str, Any] = {}
    for provider, name in ROWS_OF.items():
        rows |= rows_of(name, found[provider])
    return rows | {
        "worst_cells": [
            c["case"]
            | {"num_sms": c["num_sms"], "config": c["config"], "vs_cublas": better_ratio(c)}
            for c in sorted(found["smkern:model"], key=better_ratio)[:20]
        ],
    }


def by_provider(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The cells of the model and of dispatch that cuBLAS was measured beside."""
    cells = list(cells)
    return {provider: compared(cells, provider) for provider in BACKENDS}


def rows_of(name: str, found: Sequence[Cell]) -> dict[str, Any]:
    """A provider's rows; of what was measured twice the better counts for the worst.

    A cell must lose in both measurements to count as lost; the geomean is of the second.
    """
    better = [better_ratio(cell) for cell in found]
    under = sum(value < UNDER for value in better) / len(better) if better else None
    last = geomean(settled_ratio(cell) for cell in found)
    return {
        f"{name}_geomean": target_row(last, GEOMEAN, len(found)),
        f"{name}_worst": target_row(min(better, default=None), WORST, len(found))
        | {"cells_under": sum(value < WORST for value in better)},
        f"{name}_share_under_0.97": target_row(under, SHARE_UNDER, len(found), at_most=True),
    }


def summarize_left_out(cells: Iterable[Cell]) -> dict[str, Any]:
    """Time by a model that never saw the shape over the tuned time, both in the same rounds."""
    own = by_problem(cells)
    pairs = [c for c in own if len(c) == 2 and c["smkern:triton"]["source"] == "table"]
    ratios = {id(c): c["smkern:model"]["us"] / c["smkern:triton"]["us"] for c in pairs}
    worst = sorted(pairs, key=lambda c: -ratios[id(c)])
    return {
        "left_out_geomean": target_row(
            geomean(ratios.values()), LEFT_OUT_GEOMEAN, len(pairs), at_most=True
        ),
        "left_out_worst": target_row(
            max(ratios.values(), default=None), LEFT_OUT_WORST, len(pairs), at_most=True
        )
        | {"cells_over": sum(value > LEFT_OUT_WORST for value in ratios.values())},
        "left_out_worst_cells": [
            {
                **c["smkern:model"]["case"],
                "num_sms": c["smkern:model"]["num_sms"],
                "over_tuned": round(ratios[id(c)], 3),
                "config": c["smkern:model"]["config"],
                "tuned": c["smkern:triton"]["config"],
            }
            for c in worst[:20]
        ],
    }


def constants_without(shape: Shape, folder: Path) -> CostConstants:
    """The constants whose fit left a shape out: `NxK.json` of a folder."""
    path = folder / f"{shape[0]}x{shape[1]}.json"
    remedy = "make them: python -m smkern.autotune.fit RAW --leave-out FOLDER"
    return read_constants(path, f"fitted without {path.stem}", remedy)


@suite_command(
    "untuned",
    click.option(
        "--left-out",
        type=click.Path(path_type=Path, file_okay=False, exists=True),
        help="Folder of constants, each fitted without a shape: the committed shapes by them.",
    ),
    TIME_LIMIT_OPTION,
    AGAIN_OPTION,
    quick="A tenth of the cells.",
)
def command(output: Output, *, left_out: Path | None, again: bool) -> None:
    """Time what the cost model alone chooses, on shapes, rows and budgets that no table holds.

    Beside it what dispatch takes, with the extra `cutlass` where it is there, and cuBLAS in the
    same partition, spread and the driver's own, of which the better counts.
    """
    info = device_info()
    if left_out is not None:
        groups = gemm_groups(budgets=there(BUDGETS))
        suite, again = left_out_suite(left_out), False
    else:
        groups = untuned_groups(info.num_sms)
        tuned = {(key.n, key.k) for key in GEMM_FAMILY.load(load_profile()).cells}
        check_unseen(shapes(), tuned, "this GPU's table")
        check_unseen(shapes(), fitted_shapes(info.name), "the cost model's fit")
        suite = GemmChoice(BACKENDS, context=False).suite(summarize, dict.fromkeys(BACKENDS, UNDER))
    groups = groups[:: 10 if output.quick else 1]
    results = output.open()
    conclude(results, output.path, suite.run(groups, results, output, again=again))


def left_out_suite(folder: Path) -> GroupSuite[GemmCase]:
    """The committed shapes, each by the constants of `folder` that were fitted without it."""
    dispatcher = dispatcher_of()

    def use(shape: Shape) -> None:
        dispatcher.constants = constants_without(shape, folder)

    return GemmChoice(LEFT_OUT, peers=False, context=False, before=use).suite(summarize_left_out)
