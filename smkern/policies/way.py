"""A way to go on with prompts, and what it is like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["mixed", "split", "turns"]


@dataclass(frozen=True, slots=True)
class Way:
    """A way to go on with prompts.

    Attributes:
        mode: "mixed": a chunk in the decode forward; "split": layers beside decode steps; "turns":
            layers between them.
        rate: New tokens a microsecond.
        rung: SMs of the decode side, where it splits.
        step_us: Decode step, as predicted, with what runs before it in turns.
        us: Until the next choice: a forward, all layers of a batch, or a turn of layers and a step.
        chunk: New tokens of a mixed forward, at most.
    """

    mode: Mode
    rate: float
    rung: int | None
    step_us: float
    us: float
    chunk: int = 0
