"""Whether a simulated device can be what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from smkern.errors import ArgumentError
from smkern.latency.predictor import Predictor
from smkern.latency.ring import Ring, WithRing
from smkern.limits import as_float, as_int, shown


def as_rungs(rungs: Sequence[int], num_sms: int) -> tuple[int, ...]:
    """Rungs of a device of so many SMs; ArgumentError for anything else."""
    try:
        sides = [as_int("rungs", rung, 1, num_sms - 1) for rung in rungs]
        is_ascending = sides == sorted(set(sides))
    except Exception:  # noqa: BLE001  of whatever stands for rungs
        is_ascending = False
    if not is_ascending:
        raise ArgumentError(f"rungs={shown(rungs)}: give ascending SM counts of 1 to {num_sms - 1}")
    return tuple(sides)


def check_costs(costs: Mapping[str, float]) -> None:
    """Raise ArgumentError for a host's time that cannot be."""
    for name, cost in costs.items():
        if not 0 <= as_float(name, cost) < inf:
            raise ArgumentError(f"{name}={cost}: give a finite time of at least 0")


def as_part(predictor: Predictor | None, tp: Ring | None) -> Predictor | None:
    """A predictor with the sums of GPUs that share the model; ArgumentError for sums alone."""
    if tp is None:
        return predictor
    if not isinstance(tp, Ring) or predictor is None:
        raise ArgumentError(
            f"tp={shown(tp)} with predictor={shown(predictor)}: pass a smkern.latency.Ring, and "
            "what prices one GPU's part of the model"
        )
    return WithRing(predictor, tp)
