"""Cells and rows of `power.json`: equally fast configurations, and what sets them apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from smkern.bench.rows import Cell, geomean_row, grouped, target_row

SAME = 1.02
"""Configurations whose times differ by less are equally fast."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A steady state.

    Attributes:
        us: A launch of the prompts' product; None: there was none.
        decode_us: A decode step; None: there was none.
        sm_mhz, watts: Of the whole chip; None: not read.
    """

    us: float | None
    decode_us: float | None
    sm_mhz: float | None
    watts: float | None


def figures(readings: Sequence[Reading], tokens: int | None = None) -> Cell:
    """Means of the readings, each of them, and the energy of a prompt's token.

    Args:
        readings: Of the same work.
        tokens: Prompt tokens of a launch.
    """
    found: Cell = {}
    for name, digits in (("us", 3), ("decode_us", 2), ("sm_mhz", 1), ("watts", 1)):
        values = [value for x in readings if (value := getattr(x, name)) is not None]
        found[name] = round(statistics.fmean(values), digits) if values else None
        if len(values) > 1:
            found[f"{name}_all"] = [round(value, digits) for value in values]
    if tokens and found["us"] and found["watts"]:
        found["mj_per_token"] = round(1e-3 * found["watts"] * found["us"] / tokens, 5)
    return found


def groups_of(cells: Iterable[Cell]) -> list[list[Cell]]:
    """The configurations of each product and budget beside decode, fastest first."""
    products = (c for c in cells if c["op"] == "gemm" and c["case"]["beside"] == "decode")
    sizes = ("m", "n", "k", "epilogue")
    groups = grouped(
        (cell for cell in products if cell.get("us")),
        lambda cell: (*(cell["case"][size] for size in sizes), cell["num_sms"]),
    )
    return [sorted(group, key=lambda cell: cell["us"]) for group in groups.values()]


def equally_fast(group: Sequence[Cell]) -> list[Cell]:
    """Those of a group that are `SAME` as its fastest."""
    return [cell for cell in group if cell["us"] <= SAME * group[0]["us"]]


def cooler(group: Sequence[Cell]) -> Cell:
    """Of a group's equally fast ones the one that takes the least energy a token."""
    return min(equally_fast(group), key=lambda cell: cell.get("mj_per_token") or cell["us"])


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """What equally fast configurations differ by, what the coolest of them gives decode, and how
    far what the tuner's short rounds prefer is behind under power."""
    groups, row = groups_of(cells), partial(geomean_row, at_most=True)
    ties = [near for group in groups if len(near := equally_fast(group)) > 1]
    return {
        "equally_fast": target_row(_mean(map(len, map(equally_fast, groups))), None, len(groups)),
        "decode_spread": row(_spread(near, "decode_us") for near in ties),
        "energy_spread": row(_spread(near, "mj_per_token") for near in ties),
        "noise_of_decode": row(_noise(groups, "decode_us")),
        "noise_of_products": row(_noise(groups, "us")),
        "cooler_over_fastest_decode": row(
            group[0]["decode_us"] / cooler(group)["decode_us"] for group in groups
        ),
        "tuned_over_fastest": row(
            min(group, key=lambda cell: cell["tuned_us"])["us"] / group[0]["us"] for group in groups
        ),
        "dispatched_over_fastest": row(
            cell["us"] / group[0]["us"] for group in groups for cell in group if cell["dispatched"]
        ),
    }


def _spread(near: Sequence[Cell], name: str) -> float:
    values = [cell[name] for cell in near if cell.get(name)]
    return max(values) / min(values) if values else 1.0


def _noise(groups: Iterable[Sequence[Cell]], name: str) -> list[float]:
    """How far readings of the same work are apart, as ratios."""
    every = (cell.get(f"{name}_all") for group in groups for cell in group)
    return [max(values) / min(values) for values in every if values]


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None
