"""The families of the experts' operators: routing and permutations, and the grouped GEMM."""

from __future__ import annotations

from smkern.autotune.moe_cases import calls_of
from smkern.autotune.small import small_family
from smkern.device import Profile
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.moe.grouped import grouped_dispatcher
from smkern.tuning import grouped, grouped_table, moe, moe_table


def _capability(profile: Profile) -> int:
    major, minor = profile.info.capability
    return 10 * major + minor


MOE = small_family(
    moe_table.FILE,
    moe_table.CODEC,
    key=moe_table.MoeKey.of,
    candidates=lambda problem, budget, profile: moe.candidates(problem, budget),
    choose=moe.choose,
    predict=moe.predict_us,
    select=moe_table.select_moe,
    table=moe_table.MoeTable,
    dispatcher=moe_dispatcher,
    calls=calls_of,
)
GROUPED = small_family(
    grouped_table.FILE,
    grouped_table.CODEC,
    key=grouped_table.GroupedKey.of,
    candidates=lambda problem, budget, profile: grouped.candidates(
        problem, budget, _capability(profile)
    ),
    choose=lambda problem, budget, profile: grouped.choose(
        problem, budget, profile, _capability(profile)
    ),
    predict=grouped.predict_us,
    select=grouped_table.select_grouped,
    table=grouped_table.GroupedTable,
    dispatcher=grouped_dispatcher,
    calls=calls_of,
    exact=False,
)
