"""Measuring at warmup: where the model is unsure between its best few, the fastest is kept.

What is kept is of this process and of the dispatcher that it was measured for. It serves the step
of rows (`model_rows`) of the M that was measured, in that budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from smkern.ops.checks import DTYPES
from smkern.ops.operator_eager import EagerOperator
from smkern.tuning.config import Budget, GemmConfig, GemmProblem

ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""M that are measured, up to the largest that calls will have: batches that decode graphs are
captured for, and chunks of prompts."""
ROUNDS = 5
MUST_GAIN = 1.02
"""Times that another configuration must be faster than the model's choice: noise is less."""
_BATCH_US = 300.0
_CALLS = (4, 24)
"""Launches between two events, at least and at most."""
_MAX_SETS = 64
_HEAD_START_CYCLES = 400_000
"""0.2 ms in which the host gets ahead, or short launches would be timed by its pace."""

TimeUs = Callable[[Any, Sequence[Callable[[], None]]], float]
"""(stream, launches) to us a launch."""


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """A problem in a budget, and the configurations that the model holds for about as fast.

    Args:
        eager: The operator on its device; its dispatcher keeps the fastest.
        problem: Sizes, dtype, epilogue.
        budget: What `stream` has, or the grid alone keeps.
        stream: Torch's, to measure on.
        configs: The model's choice first.
    """

    eager: EagerOperator[GemmProblem]
    problem: GemmProblem
    budget: Budget
    stream: Any
    configs: tuple[GemmConfig, ...]


def cells_of(
    eager: EagerOperator[GemmProblem], problems: Iterable[GemmProblem], places: Mapping[Budget, Any]
) -> list[Cell]:
    """What is worth measuring of some problems in the budgets of some streams."""
    found = []
    for problem in problems:
        for budget, stream in places.items():
            configs = eager.dispatcher.close_choices(problem, budget)
            if len(configs) > 1:
                found.append(Cell(eager, problem, budget, stream, configs))
    return found


def places_of(
    budgets: Iterable[Any], resolved: Iterable[Budget], current: Budget, stream: Any
) -> dict[Budget, Any]:
    """The stream to measure each budget on; budgets that none has are left out.

    Args:
        budgets: As `warmup` was given them: a partition has its own stream.
        resolved: The same as budgets.
        current: What the current stream has: it serves this, and what the grid keeps below it.
        stream: The current stream.
    """
    found = {}
    for budget in resolved:
        grid = Budget(min(budget.num_sms, current.num_sms), "grid", current.clusters)
        if budget in (current, grid):
            found[budget] = stream
    for item in budgets:
        if hasattr(item, "stream"):
            found[Budget(item.num_sms, item.confined, item.clusters)] = item.stream
    return found


def tune(
    cells: Sequence[Cell],
    seconds: float,
    *,
    time_us: TimeUs | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Measure cells in turn for so many seconds, keep the fastest of each; how many were."""
    until = clock() + seconds
    for done, cell in enumerate(cells):
        times = _measure(cell, time_us or time_on_device, lambda: clock() < until)
        if times is None:
            return done
        fastest = min(times, key=lambda config: times[config])
        if MUST_GAIN * times[fastest] > times[cell.configs[0]]:
            fastest = cell.configs[0]
        cell.eager.dispatcher.keep_measured(cell.problem, cell.budget, fastest)
        cell.eager.records.clear()  # calls seen before are prepared anew
    return len(cells)


def _measure(
    cell: Cell, time_us: TimeUs, in_time: Callable[[], bool]
) -> dict[GemmConfig, float] | None:
    """The median of rounds of each configuration, us; None where time ran out between two."""
    operands = _Operands.of(cell)
    launches = {config: operands.launches(cell, config) for config in cell.configs}
    times: dict[GemmConfig, list[float]] = {config: [] for config in cell.configs}
    count, first = _CALLS[0], 0
    for turn in range(ROUNDS + 1):
        for config in cell.configs:
            if not in_time():
                return None
            calls = launches[config]
            us = time_us(cell.stream, [calls[(first + i) % len(calls)] for i in range(count)])
            if turn:  # the first is to warm up, and to tell how many launches make a batch
                times[config].append(us)
        first += count
        if not turn:
            count = max(_CALLS[0], min(_CALLS[1], int(_BATCH_US / max(us, 1.0))))
    return {config: median(found) for config, found in times.items()}


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """Tensors of a cell; weights in enough sets that a launch does not find its own in L2."""

    a: Any
    weights: list[Any]
    out: Any
    bias: Any
    residual: Any

    @classmethod
    def of(cls, cell: Cell) -> _Operands:
        p, device = cell.problem, cell.eager.workspaces.device
        pitch = -(-p.k // 8) * 8

        def made(rows: int, columns: int) -> Any:
            return torch.empty(rows, columns, dtype=DTYPES[p.dtype], device=device).normal_()

        beyond_l2 = 2 * cell.eager.dispatcher.profile.info.l2_bytes // (2 * p.n * pitch)
        weights = [made(p.n, pitch) for _ in range(min(1 + beyond_l2, _MAX_SETS))]
        bias = made(1, p.n) if p.epilogue.bias else None
        residual = made(p.m, p.n) if p.epilogue.residual else None
        return cls(made(p.m, pitch), weights, made(p.m, p.out_columns), bias, residual)

    def launches(self, cell: Cell, config: GemmConfig) -> list[Callable[[], None]]:
        """A launch for each set of weights, which nothing writes, as a model's."""
        plan = cell.eager.dispatcher.prepare(cell.problem, config, cell.budget)
        run = plan.bind(
            self.a.stride(0), self.weights[0].stride(0), self.out.stride(0), cell.problem.n,
            static_weights=True,
        )  # fmt: skip
        room = torch.zeros(plan.workspace_bytes, dtype=torch.uint8, device=self.a.device)
        epilogue = (0 if x is None else x.data_ptr() for x in (self.bias, self.residual))
        rest = (self.out.data_ptr(), *epilogue)

        def launch(w: Any) -> None:
            run(self.a.data_ptr(), w.data_ptr(), *rest, room.data_ptr(), cell.stream.cuda_stream)

        return [partial(launch, w) for w in self.weights]


def time_on_device(stream: Any, launches: Sequence[Callable[[], None]]) -> float:
    """By events around launches that are queued while the device waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_HEAD_START_CYCLES)
        begin.record(stream)
        for launch in launches:
            launch()
        end.record(stream)
    end.synchronize()
    return 1e3 * float(begin.elapsed_time(end)) / len(launches)
