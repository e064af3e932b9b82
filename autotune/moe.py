"""The families of the experts' operators: routing and permutations, and the grouped GEMM."""

from __future__ import annotations

from smkern.autotune.family import MeasuredFamily, ranked
from smkern.autotune.moe_cases import calls_of
from smkern.autotune.small import small_tasks, small_tuner
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.moe.grouped import grouped_dispatcher
from smkern.tuning import grouped, moe

MOE = MeasuredFamily(
    family=moe.MOE,
    listed=ranked(moe.MOE),
    dispatcher=moe_dispatcher,
    tuner=small_tuner(calls_of),
    tasks=small_tasks,
)
GROUPED = MeasuredFamily(
    family=grouped.GROUPED_GEMM,
    listed=ranked(grouped.GROUPED_GEMM),
    dispatcher=grouped_dispatcher,
    tuner=small_tuner(calls_of, exact=False),
    tasks=small_tasks,
)
