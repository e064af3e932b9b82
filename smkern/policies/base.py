"""What policies have in common but decisions: how they are made, shown and fitted to a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, ClassVar, Literal

from smkern.errors import ArgumentError
from smkern.latency.predictor import Predictor
from smkern.limits import as_float
from smkern.policies.check import JOINS, check_counts
from smkern.policies.decision import Decision
from smkern.policies.order import Order, order_named
from smkern.policies.settings import (
    Limits,
    check_limit,
    check_predictor,
    check_reachable,
    check_splits,
)
from smkern.policies.snapshot import Snapshot


class BasePolicy(ABC):
    """A policy but for `decide`.

    Args:
        predictor, tbt_slo_ms, ttft_slo_ms, order: As all policies take them.
        counts: Whole numbers that it is made of, by name, to be shown; None is not.
        margin: Share of the time between tokens that no launch is planned to use.
        settings: What else it is made of, to be shown.

    Raises:
        ArgumentError: no such order or join, a count below 1, a limit or margin that is none, or a
            limit without a predictor.
    """

    decodes_alone_steadily = True
    heeds: ClassVar[tuple[Literal["tbt", "ttft"], ...]] = ("tbt", "ttft")
    """The limits from which anything follows."""
    needs_limit: ClassVar[bool] = False
    """Whether there must be a limit of the time between two tokens, and a predictor."""
    splits: ClassVar[Literal["never", "may", "must"]] = "never"
    """Whether decisions name rungs; with "must" the device must have some."""
    asks_predictor: ClassVar[bool] = True
    """Whether it ever asks how long launches take: making a predictor may take seconds."""
    first: ClassVar[str] = ""
    """The attribute that is shown ahead of all, without its name."""

    def __init__(
        self,
        predictor: Predictor | None,
        tbt_slo_ms: float | None,
        ttft_slo_ms: float | None,
        order: str | Order,
        counts: Mapping[str, int | None],
        margin: float = 0.0,
        **settings: object,
    ) -> None:
        check_counts(counts)
        if (join := settings.get("join", JOINS[0])) not in JOINS:
            raise ArgumentError(f"join={join!r}: there is {' and '.join(map(repr, JOINS))}")
        if not 0 <= as_float("margin", margin) < 1:
            raise ArgumentError(f"margin={margin}: give a share of the limit, 0 or more, under 1")
        check_predictor(predictor, tbt_slo_ms if "tbt" in self.heeds else None)
        if self.needs_limit:
            check_limit(predictor, tbt_slo_ms)
        given = Limits.of(tbt_slo_ms, ttft_slo_ms)
        self._wanted = Limits(**{f"{name}_us": getattr(given, f"{name}_us") for name in self.heeds})
        self._limits = replace(self._wanted, tbt_us=(1.0 - margin) * self._wanted.tbt_us)
        """What is planned for."""
        self.predictor = predictor
        """As it was given; timelines say beside each launch what it expects."""
        self._predictor: Any = predictor
        self._settings = {**counts, **settings, "margin": margin or None}
        self.order = order_named(order)

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> Decision:
        """The next thing to do."""

    def __repr__(self) -> str:
        """As its user would write it; what is None or infinite was not said."""
        order = getattr(self.order, "__name__", repr(self.order))
        known: dict[str, object] = {
            "tbt_slo_ms": self._wanted.tbt_us / 1000,
            "ttft_slo_ms": self._wanted.ttft_us / 1000,
            "order": None if self.order is order_named("fcfs") else order,
        }
        first = getattr(self, self.first, None) if self.first else None
        words = [] if first is None else [repr(first)]
        words += [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value!r}"
            for name, value in (known | self._settings).items()
            if value is not None and value != inf
        ]
        return f"{type(self).__name__}({', '.join(words)})"

    def check_device(self, rungs: Sequence[int], num_sms: int) -> None:
        """Raise ArgumentError for what the device does not have: rungs, or time for its limit."""
        if self.splits == "must":
            check_splits(type(self).__name__, rungs)
        check_reachable(self._wanted, self._predictor, num_sms)
