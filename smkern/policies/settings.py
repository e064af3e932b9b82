"""What all policies are told: limits, an order, a predictor; checked when a policy is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from smkern.errors import ArgumentError
from smkern.latency import Size
from smkern.latency.predictor import Predictor
from smkern.policies.snapshot import Waiting


@dataclass(frozen=True, slots=True)
class Limits:
    """What is wanted of the times that a user sees.

    Attributes:
        tbt_us: Between two tokens of a request; infinity: no limit.
        ttft_us: From arrival to first token, of a request that has no deadline; infinity: none.
    """

    tbt_us: float = inf
    ttft_us: float = inf

    @classmethod
    def of(cls, tbt_slo_ms: float | None, ttft_slo_ms: float | None) -> Limits:
        """From a policy's arguments, finite and above 0; None: no limit.

        Raises:
            ArgumentError: a limit that is none.
        """
        return cls(_limit_us("tbt_slo_ms", tbt_slo_ms), _limit_us("ttft_slo_ms", ttft_slo_ms))

    def deadline_us(self, waiting: Waiting) -> float:
        """When a request's first token is wanted."""
        own = waiting.deadline_us
        return own if own < inf else waiting.arrival_us + self.ttft_us


def check_predictor(predictor: Predictor | None, tbt_slo_ms: float | None) -> None:
    """Raise ArgumentError for a limit without a predictor, or for one that is none."""
    if predictor is None and tbt_slo_ms is not None:
        raise ArgumentError(
            f"tbt_slo_ms={tbt_slo_ms} without a predictor: pass one, for instance "
            "smkern.predictor_for(model)"
        )
    if predictor is not None and not callable(getattr(predictor, "alone_us", None)):
        raise ArgumentError(
            f"predictor={predictor!r:.80}, of type {type(predictor).__name__}: pass an object "
            "with alone_us() and slowdown(), as in smkern.latency"
        )


def check_limit(predictor: Predictor | None, tbt_slo_ms: float | None) -> None:
    """Raise ArgumentError where a policy that splits by a limit has none, or no predictor."""
    if predictor is None or tbt_slo_ms is None:
        raise ArgumentError(
            f"tbt_slo_ms={tbt_slo_ms}, predictor={predictor}: this policy splits the device by a "
            "limit of the time between two tokens, in ms, and a predictor's times, for instance "
            "smkern.predictor_for(model)'s; give both"
        )


def check_splits(name: str, rungs: Sequence[int], rung: int | None = None) -> None:
    """Raise ArgumentError where a device has no rung, or not the one that a policy names."""
    if not rungs:
        raise ArgumentError(
            f"{name} splits the device, and this one has no rungs: make it with a ladder of some, "
            "such as smkern.ladder([16, 32]), or take Chunked"
        )
    if rung is not None and rung not in rungs:
        raise ArgumentError(
            f"{name}({rung}): this device has the rungs {list(rungs)}; take one of them"
        )


def check_reachable(limits: Limits, predictor: Predictor | None, num_sms: int) -> None:
    """Raise ArgumentError for a limit that not even one request that decodes alone can meet."""
    if predictor is None or limits.tbt_us == inf:
        return
    least_us = predictor.alone_us(Size(layers=1, num_layers=1, batch=1, total_kv=1), num_sms)
    if least_us > limits.tbt_us:
        raise ArgumentError(
            f"tbt_slo_ms={limits.tbt_us / 1000:g}: a decode step of one request takes "
            f"{least_us / 1000:.2f} ms on all {num_sms} SMs by the predictor; give more than that"
        )


def _limit_us(name: str, limit_ms: float | None) -> float:
    if limit_ms is None:
        return inf
    if isinstance(limit_ms, bool) or not isinstance(limit_ms, int | float):
        raise ArgumentError(f"{name}={limit_ms!r}: give a time in ms, or None for none")
    if not 0 < limit_ms < inf:
        raise ArgumentError(f"{name}={limit_ms}: give a finite time above 0, or None for none")
    return 1000.0 * limit_ms
