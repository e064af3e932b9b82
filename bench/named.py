"""Cases that have names: a case in a budget, and cases by parts of their names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


@dataclass(frozen=True, slots=True)
class Group(Generic[C]):
    """One case in one budget: all its providers are timed in the same rounds."""

    case: C
    num_sms: int


def groups_of(cases: Iterable[C], budgets: Iterable[int]) -> list[Group[C]]:
    """All groups, a case after the other, so that its operands are made once."""
    budgets = tuple(budgets)
    return [Group(case, num_sms) for case in cases for num_sms in budgets]


def named(cases: Sequence[C], names: Iterable[str]) -> tuple[C, ...]:
    """The cases whose names contain one of `names`; in their own order.

    Raises:
        ValueError: a name that no case has.
    """
    names = tuple(names)
    for name in names:
        if not any(name in case.name for case in cases):
            known = ", ".join(case.name for case in cases)
            raise ValueError(f"no case is named {name!r}; there are {known}")
    return tuple(case for case in cases if any(name in case.name for name in names))
