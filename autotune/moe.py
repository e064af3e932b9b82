"""`smkern autotune --op moe` and `--op grouped_gemm`: the experts' operators in partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smkern.autotune import family
from smkern.autotune.moe_cases import QUICK_TOKENS, TOKENS, MoeCase, Op, calls_of, cases_of
from smkern.autotune.places import Place
from smkern.autotune.sitting import Request
from smkern.autotune.small import SmallTuner
from smkern.bench.attention.cases import BUDGETS, QUICK_BUDGETS
from smkern.profile import Profile
from smkern.tuning import grouped, grouped_table, moe, moe_table

__all__ = [
    "BUDGETS", "GROUPED", "MOE", "QUICK_BUDGETS", "QUICK_TOKENS", "TOKENS", "Family", "Request",
]  # fmt: skip

MAX_CANDIDATES = 12


class AnyBits(SmallTuner[Any, Any]):
    """Of candidates that may sum in other orders: each is held against the reference alone."""

    __slots__ = ()

    def _checked(
        self, problem: Any, place: Place, config: Any, first: Any, errors: dict[Any, str]
    ) -> Any:
        return super()._checked(problem, place, config, [], errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(family.Family):
    """Operators of the experts that share a table: `ops` are measured."""

    ops: tuple[Op, ...]
    most: int | None = MAX_CANDIDATES

    def tuned_cases(self, tokens: Sequence[int] = TOKENS) -> list[MoeCase]:
        """Each operator of each model, a case for each number of tokens."""
        return cases_of(self.ops, tokens)


def _capability(profile: Profile) -> int:
    major, minor = profile.info.capability
    return 10 * major + minor


def _moe_dispatcher(index: int) -> Any:
    from smkern.ops.moe.dispatch import moe_dispatcher

    return moe_dispatcher(index)


def _grouped_dispatcher(index: int) -> Any:
    from smkern.ops.moe.grouped import grouped_dispatcher

    return grouped_dispatcher(index)


MOE = Family(
    ops=("topk_softmax", "moe_permute", "moe_unpermute"),
    key=moe_table.MoeKey.of,
    codec=moe_table.CODEC,
    candidates=lambda problem, budget, profile: moe.candidates(problem, budget),
    choose=moe.choose,
    predict=moe.predict_us,
    dispatcher=_moe_dispatcher,
    calls=calls_of,
)
GROUPED = Family(
    ops=("gate_up", "down"),
    key=grouped_table.GroupedKey.of,
    codec=grouped_table.CODEC,
    candidates=lambda problem, budget, profile: grouped.candidates(
        problem, budget, _capability(profile)
    ),
    choose=lambda problem, budget, profile: grouped.choose(
        problem, budget, profile, _capability(profile)
    ),
    predict=grouped.predict_us,
    dispatcher=_grouped_dispatcher,
    calls=calls_of,
    tuner=AnyBits,
)
