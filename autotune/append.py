"""The append's family: cases, operands, candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from smkern.autotune.attention_cases import Heads
from smkern.autotune.family import MeasuredFamily, ranked
from smkern.autotune.measure import Tuner
from smkern.autotune.operator_tuner import operator_tasks
from smkern.measure.append import (
    TOLERANCE,
    AppendCase,
    AppendOperands,
    Kind,
    call_of,
    problem_of_case,
)
from smkern.measure.partitions import Place
from smkern.ops.append.dispatch import append_dispatcher
from smkern.ops.append.operators import APPEND, APPEND_KV
from smkern.ops.operator_dispatch import OperatorDispatcher
from smkern.tuning.append import APPEND_FAMILY, AppendConfig, AppendProblem

TOKENS = (8, 64, 512, 4096)
QUICK_TOKENS = (64,)


def tuned_cases(
    models: Sequence[Heads], *, cache_dtype: str = "bf16", tokens: Sequence[int] = TOKENS
) -> list[AppendCase]:
    """Every kind with this cache, of every size, of each model; KV heads alone are models too."""
    kinds: tuple[Kind, ...] = ("fp8",) if cache_dtype == "fp8" else ("plain", "norm-rope")
    found = [
        AppendCase(kind, count, heads.num_q_heads, heads.num_kv_heads, heads.head_dim)
        for heads in models
        for kind in kinds
        for count in tokens
    ]
    return list({case.problem: case for case in reversed(found)}.values())[::-1]


class AppendTuner(Tuner[AppendProblem, AppendConfig]):
    """Measures cells of one case on one device.

    Args:
        dispatcher: prepares the launches.
        operands: rows, caches and tables.
    """

    def __init__(
        self, dispatcher: OperatorDispatcher[AppendProblem, AppendConfig], operands: AppendOperands
    ) -> None:
        self.dispatcher, self.operands = dispatcher, operands
        self.name = operands.case.op
        self.tolerance = TOLERANCE[operands.case.cache_dtype]

    def expected(self, problem: AppendProblem) -> Sequence[Tensor]:
        out, *rows = self.operands.wanted()
        return [out, *rows] if self.operands.case.turns else rows

    def results(self, problem: AppendProblem) -> Sequence[Tensor]:
        ops = self.operands
        return [*((ops.sets[0].out,) if ops.case.turns else ()), *ops.rows("HND")]

    def poison(self, problem: AppendProblem) -> None:
        self.operands.poison()

    def launches(
        self, problem: AppendProblem, place: Place, config: AppendConfig
    ) -> Sequence[Callable[[], object]]:
        ops, op = self.operands, APPEND if self.operands.case.turns else APPEND_KV
        launch = self.dispatcher.launch_by(config, problem_of_case(ops), place.budget, False)
        launch = partial(launch, place.stream.cuda_stream)
        calls = [call_of(ops, index) for index in range(len(ops.sets))]
        return [partial(launch, *op.addresses(call), *op.numbers(call)) for call in calls]


def _tuner(cases: Sequence[AppendCase], dispatcher: Any, device: str) -> AppendTuner:
    (case,) = cases
    return AppendTuner(dispatcher, AppendOperands(case, device))


FAMILY = MeasuredFamily(
    tuned=APPEND_FAMILY,
    listed=ranked(APPEND_FAMILY),
    dispatcher=append_dispatcher,
    tuner=_tuner,
    tasks=operator_tasks,
)
