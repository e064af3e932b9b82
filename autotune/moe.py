"""The families of the experts' operators: routing and permutations, and the grouped GEMM."""

from __future__ import annotations

from smkern.autotune.family import Family, cell_file, ranked
from smkern.autotune.moe_cases import calls_of
from smkern.autotune.small import small_tasks, small_tuner
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.moe.grouped import grouped_dispatcher
from smkern.profile import Profile
from smkern.tuning import grouped, grouped_table, moe, moe_table


def _capability(profile: Profile) -> int:
    major, minor = profile.info.capability
    return 10 * major + minor


MOE = Family(
    name=moe_table.FILE,
    file=cell_file(moe_table.CODEC),
    table=moe_table.MoeTable.of,
    key=moe_table.MoeKey.of,
    listed=ranked(lambda x, budget, profile: moe.candidates(x, budget), moe.choose, moe.predict_us),
    select=moe_table.select_moe,
    dispatcher=moe_dispatcher,
    tuner=small_tuner(calls_of),
    tasks=small_tasks,
)
GROUPED = Family(
    name=grouped_table.FILE,
    file=cell_file(grouped_table.CODEC),
    table=grouped_table.GroupedTable.of,
    key=grouped_table.GroupedKey.of,
    listed=ranked(
        lambda x, budget, profile: grouped.candidates(x, budget, _capability(profile)),
        lambda x, budget, profile: grouped.choose(x, budget, profile, _capability(profile)),
        grouped.predict_us,
    ),
    select=grouped_table.select_grouped,
    dispatcher=grouped_dispatcher,
    tuner=small_tuner(calls_of, exact=False),
    tasks=small_tasks,
)
