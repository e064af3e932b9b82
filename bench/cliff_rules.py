"""When more SMs count as a cliff: arithmetic over one case's times, a budget a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SLOWER_BY = 1.02
"""More SMs may not be slower than the best of fewer by more than this: 2%."""

NARROW_SMS = 60
PER_SM_NARROW = 0.90
PER_SM_WIDE = 0.80
"""Rate per SM over the best at any smaller budget: up to 60 SMs, and above."""


def slower(us: Mapping[int, float]) -> dict[int, float]:
    """Budgets slower than a smaller one by more than 2%: budget to time over the best before it.

    >>> slower({16: 10.0, 18: 9.0, 20: 9.5})
    {20: 1.0556}
    """
    best = float("inf")
    found = {}
    for num_sms in sorted(us):
        if us[num_sms] > SLOWER_BY * best:
            found[num_sms] = round(us[num_sms] / best, 4)
        best = min(best, us[num_sms])
    return found


def per_sm(us: Mapping[int, float]) -> dict[int, float]:
    """Rate per SM over the best rate per SM at any smaller budget; the smallest budget is 1."""
    return _over_best({n: 1 / (us[n] * n) for n in us})


def _over_best(rates: Mapping[int, float]) -> dict[int, float]:
    best = 0.0
    found = {}
    for num_sms, rate in sorted(rates.items()):
        found[num_sms] = round(rate / best, 4) if best else 1.0
        best = max(best, rate)
    return found


def _below(fractions: Mapping[int, float]) -> dict[int, float]:
    limits = {n: PER_SM_NARROW if n <= NARROW_SMS else PER_SM_WIDE for n in fractions}
    return {n: fraction for n, fraction in fractions.items() if fraction < limits[n]}


def uneven(us: Mapping[int, float]) -> dict[int, float]:
    """Budgets whose rate per SM falls below 0.90 (up to 60 SMs) or 0.80 of the best before it."""
    return _below(per_sm(us))


def uneven_of_ceiling(fractions: Mapping[int, float]) -> dict[int, float]:
    """The same rule on fractions of each partition's own ceiling.

    Where bandwidth binds, the rate per SM must fall: 48 of 132 SMs read all that HBM gives.
    """
    return _below(_over_best(fractions))


def judge(us: Mapping[int, float], fractions: Mapping[int, float]) -> dict[str, Any]:
    """One case's verdict: what is slower, what is uneven, and the worst of each."""
    worse, flat, of_ceiling = slower(us), uneven(us), uneven_of_ceiling(fractions)
    return {
        "budgets": len(us),
        "slower": worse,
        "worst_slower": max(worse.values(), default=1.0),
        "uneven_per_sm": flat,
        "worst_per_sm_up_to_60": _least(us, narrow=True),
        "worst_per_sm_above_60": _least(us, narrow=False),
        "uneven_of_ceiling": of_ceiling,
        "met": not worse and not flat,
        "met_of_ceiling": not worse and not of_ceiling,
    }


def _least(us: Mapping[int, float], *, narrow: bool) -> float | None:
    found = [f for n, f in per_sm(us).items() if (n <= NARROW_SMS) == narrow]
    return min(found, default=None)


def to_measure_again(us: Mapping[int, float]) -> set[int]:
    """The budgets that broke a rule, and those that they were held against."""
    suspects = {*slower(us), *uneven(us)}
    best_before = set()
    for num_sms in suspects:
        smaller = [n for n in us if n < num_sms]
        best_before.add(min(smaller, key=lambda n: us[n]))
        best_before.add(min(smaller, key=lambda n: us[n] * n))
    return suspects | best_before
