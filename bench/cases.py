"""Cases in budgets: what a suite measures, and how its options choose among it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import click

from smkern.bench.cells import Work
from smkern.bench.suite import AGAIN_OPTION, BUDGETS_OPTION, TIME_LIMIT_OPTION, UnknownNameError
from smkern.device import device_info


class Measured(Work, Protocol):
    """A case: what is computed, what that moves and computes, the `case` of its cells."""

    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def about(self) -> dict[str, Any]: ...


C = TypeVar("C", bound=Measured)


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
        UnknownNameError: a name that no case has.
    """
    names = tuple(names)
    for name in names:
        if not any(name in case.name for case in cases):
            known = ", ".join(case.name for case in cases)
            raise UnknownNameError(f"no case is named {name!r}; there are {known}")
    return tuple(case for case in cases if any(name in case.name for name in names))


def there(budgets: Iterable[int]) -> tuple[int, ...]:
    """Those that the device has SMs for."""
    total = device_info().num_sms
    return tuple(n for n in budgets if n <= total)


@dataclass(frozen=True, slots=True)
class Sizes(Generic[C]):
    """What a suite measures, what with `--quick`, and what `more` where it is named."""

    cases: Sequence[C]
    quick_cases: Sequence[C]
    budgets: Sequence[int]
    quick_budgets: Sequence[int]
    more: Sequence[C] = ()

    def groups(
        self, *, quick: bool, cases: str | None, budgets: Sequence[int] | None
    ) -> list[Group[C]]:
        """Every case asked for in every budget; of a suite's own budgets those of this device.

        Raises:
            UnknownNameError: a part of `cases`, apart by commas, that no case's name has.
        """
        most = self.quick_cases if quick else self.cases
        chosen = named((*self.cases, *self.more), cases.split(",")) if cases else most
        own = self.quick_budgets if quick else self.budgets
        return groups_of(chosen, budgets or there(own))


def case_options(
    example: str, *, peers: Sequence[str] | None = None
) -> tuple[Callable[[Any], Any], ...]:
    """The options of a suite of named cases.

    Args:
        example: parts of case names.
        peers: who takes part unless named; None where nobody can be named.
    """
    beside = click.option(
        "--peers", default=",".join(peers or ()), show_default=True, help="Beside whom."
    )
    return (
        click.option("--cases", default=None, help=f"Parts of case names: {example}"),
        BUDGETS_OPTION,
        TIME_LIMIT_OPTION,
        *([] if peers is None else [beside]),
        AGAIN_OPTION,
    )
