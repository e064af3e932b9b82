"""Times of a model's GEMMs by rows and SMs, as the tuned tables and the cost model have them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

ROWS = (1, 2, 4, 8, *range(16, 257, 16), *range(320, 1025, 64), *range(1152, 2049, 128),
        *range(2304, 8705, 256))  # fmt: skip
"""Rows between which a launch takes as long as the next of these: graphs of decode steps are made
for the first, tiles of prompts end at the others."""
NUM_HEAD_ROWS = ROWS.index(256) + 1
"""How many of these the head has."""
STAIR = 2048
"""Rows above which a tile more is a small part, and times are a line."""


@dataclass(frozen=True, slots=True)
class GemmTimes:
    """GEMMs of a layer, and of the head, us; what other kernels take is left out.

    None takes longer than those of more rows, which it could be padded to: what tables and model
    say falls by up to 20% from one of `ROWS` to the next, where launches that were timed do not.

    Attributes:
        sms: SMs, ascending.
        layer_us: By SMs, then by `ROWS`.
        head_us: By SMs, then by the first `NUM_HEAD_ROWS` of `ROWS`.
    """

    sms: tuple[int, ...]
    layer_us: tuple[tuple[float, ...], ...]
    head_us: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for name in ("layer_us", "head_us"):
            rows = getattr(self, name)
            object.__setattr__(self, name, tuple(_rising(row) for row in rows))

    @classmethod
    def of(cls, sms: Sequence[int], us: Callable[[int, int], tuple[float, float]]) -> GemmTimes:
        """From us(rows, num_sms): of a layer, and of the head."""
        found = [[us(rows, num_sms) for rows in ROWS] for num_sms in sorted(sms)]
        return cls(
            tuple(sorted(sms)),
            tuple(tuple(layer for layer, _ in row) for row in found),
            tuple(tuple(head for _, head in row[:NUM_HEAD_ROWS]) for row in found),
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GemmTimes:
        """As a table's provenance has them; KeyError, TypeError or ValueError where it has none."""
        layer, head = values["layer_us"], values["head_us"]
        made = cls(
            tuple(int(n) for n in values["sms"]),
            tuple(tuple(float(x) for x in row) for row in layer),
            tuple(tuple(float(x) for x in row) for row in head),
        )
        if not len(made.sms) == len(made.layer_us) == len(made.head_us) > 0:
            raise ValueError(f"GEMM times of {len(layer)} and {len(head)} counts of SMs")
        counts = {len(row) for row in made.layer_us}, {len(row) for row in made.head_us}
        if counts != ({len(ROWS)}, {NUM_HEAD_ROWS}):
            raise ValueError(f"GEMM times want {len(ROWS)} rows each, of the head {NUM_HEAD_ROWS}")
        return made

    def to_json(self) -> dict[str, Any]:
        def rounded(table: tuple[tuple[float, ...], ...]) -> list[list[float]]:
            return [[round(x, 1) for x in row] for row in table]

        return {
            "sms": list(self.sms),
            "layer_us": rounded(self.layer_us),
            "head_us": rounded(self.head_us),
        }

    def us(self, tokens: int, rows: int, layers: int, num_sms: int) -> float:
        """Some layers of so many tokens, and the head of so many rows."""
        at = max(0, bisect_right(self.sms, num_sms) - 1)  # more SMs are never slower
        us = layers * _at(self.layer_us[at], tokens)
        return us + _at(self.head_us[at], rows) if rows else us


def _rising(us: Sequence[float]) -> tuple[float, ...]:
    """The same, each at most the next."""
    return tuple(accumulate(reversed(us), min))[::-1]


def _at(values: tuple[float, ...], rows: int) -> float:
    """The next step of the stair; a line above it, and through 0 beyond."""
    right = bisect_left(ROWS, rows)
    if right >= len(values):
        return values[-1] * rows / ROWS[len(values) - 1]
    if rows <= STAIR:
        return values[right]
    share = (rows - ROWS[right - 1]) / (ROWS[right] - ROWS[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
