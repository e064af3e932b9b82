"""`torchrun --nproc-per-node 2 -m smkern bench ranks`: a model over several GPUs, each shared.

By one process, `--only served`, what one GPU does with the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import click
import torch

from smkern.bench.ranks import forwards, serving, sums
from smkern.bench.ranks.group import RankGroup
from smkern.bench.ranks.rows import Cell, summarize
from smkern.bench.results import Results
from smkern.bench.runtime.cases import RuntimePlan
from smkern.bench.suite import TIME_LIMIT_OPTION, Output, conclude, known_names, suite_command
from smkern.measure.options import IntList
from smkern.measure.partitions import Partitions
from smkern.models import TensorParallel

Measured = Callable[[], Iterator[Cell]]


def _tasks(
    tp: TensorParallel, group: RankGroup, only: tuple[str, ...], plan: RuntimePlan
) -> Iterator[Measured]:
    if "sums" in only:
        yield lambda: sums.sum_cells(group)
    if "forwards" in only:
        for name in forwards.MODELS:
            yield lambda name=name: forwards.forward_cells(group, name)  # type: ignore[misc]
    if "served" in only:
        yield lambda: serving.served_cells(tp, plan)


SUBJECTS = ("sums", "forwards", "served")


@suite_command(
    "ranks",
    click.option("--only", default=None, help=f"Subjects, among: {','.join(SUBJECTS)}"),
    click.option("--limits", type=IntList(), default=None, help="TBT limits, ms: 30,50"),
    TIME_LIMIT_OPTION,
)
def command(output: Output, *, only: str | None, limits: tuple[int, ...] | None) -> None:
    """Measure sums over GPUs, forwards of a part and serving, under torchrun.

    All ranks run the command; rank 0 writes the file.
    """
    names = known_names(only, SUBJECTS, "subject")
    plan = replace(serving.PLAN, served_ms=limits or serving.PLAN.served_ms)
    tp = TensorParallel.from_env(int(os.environ.get("WORLD_SIZE", "2")), "cuda")
    results = output.open() if tp.rank == 0 else Results()
    device = torch.cuda.current_device()
    budgets = {*sums.BUDGETS, *forwards.BUDGETS}
    with Partitions(budgets, ("spread",), device=device) as partitions:
        for measure in _tasks(tp, RankGroup(tp, partitions), names, plan):
            for cell in measure():
                if tp.rank == 0:
                    click.echo(_line(cell))
                    results.add(cell)
                    results.summary = summarize(results.cells)
                    results.save(output.path)
            if any(tp.everyones(output.deadline.passed)):
                break
    if tp.rank == 0:
        conclude(results, output.path, 0)
    tp.close()


def _line(cell: Cell) -> str:
    figure = f"{cell['us']} us" if "us" in cell else f"{cell['value']} {cell['unit']}"
    case = " ".join(f"{k}={v}" for k, v in cell["case"].items())
    return f"{cell['op']} {case} on {cell.get('num_sms', '')} [{cell['provider']}] {figure}"
