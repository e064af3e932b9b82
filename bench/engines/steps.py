"""What an engine's log of steps says: times between tokens, and how many of a prompt's each had."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from smkern.bench.runtime.figures import percentile


class Step(NamedTuple):
    """A step whose tokens the engine has just got.

    Attributes:
        at_s: When.
        rows: Requests that decoded in it.
        prompt_tokens: Tokens of prompts that it computed.
    """

    at_s: float
    rows: int
    prompt_tokens: int


@dataclass(slots=True)
class Steps:
    """Steps that follow each other, all rows in each.

    Attributes:
        times_ms: Time between two tokens of a row.
        prompt_tokens: Of all of them.
        sm_mhz: Clock as NVML reports it, which lags; None: not read.
        watts: Power of the board; None: not read.
    """

    times_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    sm_mhz: float | None = None
    watts: float | None = None

    @classmethod
    def of(cls, log: Sequence[Step], rows: int, *, has_prompt: bool) -> Steps:
        """The steps behind a step that had all rows, too.

        Args:
            log: In order.
            rows: Requests that decode.
            has_prompt: Whether only steps with tokens of prompts count: those that a budget makes
                long. Without, rows decode alone.
        """
        found = cls()
        for before, after in pairwise(log):
            if before.rows == after.rows == rows and bool(after.prompt_tokens) == has_prompt:
                found.times_ms.append(1e3 * (after.at_s - before.at_s))
                found.prompt_tokens += after.prompt_tokens
        return found

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.times_ms)

    @property
    def p99_ms(self) -> float:
        return percentile(self.times_ms, 0.99)

    @property
    def tokens_per_ms(self) -> float:
        return self.prompt_tokens / sum(self.times_ms)

    def figures(self) -> dict[str, Any]:
        """What a cell says beside its value."""
        return {
            "tbt_p50_ms": round(self.p50_ms, 3),
            "tbt_p99_ms": round(self.p99_ms, 3),
            "tbt_max_ms": round(max(self.times_ms), 3),
            "tokens_per_ms": round(self.tokens_per_ms, 3),
            "steps": len(self.times_ms),
            "nvml_mhz": self.sm_mhz,
            "watts": self.watts,
        }
