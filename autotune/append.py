"""The append's family: cases, operands, candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from smkern.autotune.attention_cases import Heads
from smkern.autotune.family import MeasuredFamily, Tasks, ranked
from smkern.autotune.measure import Tuner
from smkern.autotune.places import Place
from smkern.device import Budget
from smkern.measure.append import (
    TOLERANCE,
    AppendCase,
    AppendOperands,
    Kind,
    call_of,
    problem_of_case,
)
from smkern.measure.timing import Call
from smkern.ops.append.operators import APPEND as QK_NORM_ROPE_APPEND
from smkern.ops.append.operators import APPEND_KV
from smkern.ops.operator_dispatch import Compile, OperatorDispatcher
from smkern.tuning.append import APPEND, AppendConfig, AppendProblem

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
    return list({shape_of(case): case for case in reversed(found)}.values())[::-1]


def shape_of(case: AppendCase) -> AppendProblem:
    """The case as keys and the cost model see it; needs no tensors."""
    turned = (case.rotary_dim or case.head_dim) if case.turns else 0
    return AppendProblem(
        case.tokens, len(case.q_lens), case.num_q_heads if case.turns else 0, case.num_kv_heads,
        case.head_dim, case.page_size, "bf16", case.cache_dtype, turned, norm=case.norms,
        ragged=not case.is_decode,
    )  # fmt: skip


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

    def call(self, problem: AppendProblem, place: Place, config: AppendConfig) -> Call:
        ops, op = self.operands, QK_NORM_ROPE_APPEND if self.operands.case.turns else APPEND_KV
        launch = self.dispatcher.launch_by(config, problem_of_case(ops), place.budget, False)
        calls = [call_of(ops, index) for index in range(len(ops.sets))]
        given = [(*op.addresses(call), *op.numbers(call)) for call in calls]
        stream, count = place.stream.cuda_stream, len(given)

        def call(i: int) -> None:
            launch(stream, *given[i % count])

        return call


def _dispatcher(index: int) -> OperatorDispatcher[AppendProblem, AppendConfig]:
    from smkern.ops.append.dispatch import append_dispatcher

    return append_dispatcher(index)


def _tuner(cases: Sequence[AppendCase], dispatcher: Any, device: str = "cuda") -> AppendTuner:
    (case,) = cases
    return AppendTuner(dispatcher, AppendOperands(case, device))


def _tasks(
    problem: AppendProblem, budget: Budget, configs: Sequence[AppendConfig], dispatcher: Any
) -> Tasks:
    """All kernels of the problem's kind: its first launch loads them all."""
    return {x: Compile(x) for x in dispatcher.kernels().variants(problem)}


FAMILY = MeasuredFamily(
    family=APPEND,
    listed=ranked(APPEND),
    dispatcher=_dispatcher,
    tuner=_tuner,
    tasks=_tasks,
    problem=shape_of,
)
