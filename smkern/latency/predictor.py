"""The protocol of a predictor: how long a launch takes, alone and beside another."""

from __future__ import annotations

from typing import Protocol

from smkern.latency.work import Size


class Predictor(Protocol):
    """Prices launches; pure and deterministic, microseconds and SM counts."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it, on so many SMs."""
        ...

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """How many times longer it takes while `beside` runs on other SMs; at least 1."""
        ...
