"""The rows that an operators' results file must show, computed from its cells alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from smkern.bench.ops.cases import APPENDS, CASES
from smkern.bench.rows import Cell, Row, geomean, not_measured, rounded, settled, worst_row

APPEND = "qk_norm_rope_append"
OPS = tuple(dict.fromkeys((*(case.op for case in CASES), *(case.op for case in APPENDS))))
STREAMING = ("add_rms_norm", APPEND)
STREAMING_TOKENS, STREAMING_SHARE = 8192, 0.80
"""Least share of the partition's bandwidth, for these operators from so many tokens on."""
SAMPLE_BATCH, SAMPLE_READS = 128, 3.0


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """Value, target, whether it is met, how many cells; {} where no cell is the suite's."""
    ours = [c for c in cells if c["op"] in OPS and c["provider"] == "smkern"]
    if not ours:
        return {}
    measured = [c for c in ours if c.get("us")]
    by = {op: [c for c in measured if c["op"] == op] for op in OPS}
    large = [c for c in measured if c["case"].get("tokens", 0) >= STREAMING_TOKENS]
    sampled = [c for c in by["sample"] if c["case"]["batch"] == SAMPLE_BATCH]
    shares = {op: [c for c in large if c["op"] == op] for op in STREAMING}
    return {
        "worst_vs_best": {op: _lead_row(found) for op, found in by.items() if found},
        "bandwidth_of_8192_tokens": {
            op: _row(found, lambda c: c["fraction_of_bandwidth"], STREAMING_SHARE)
            for op, found in shares.items()
        },
        "sample_reads_of_logits": _row(sampled, reads, SAMPLE_READS, at_most=True),
        "not_measured": not_measured(ours, _name),
    }


def reads(cell: Cell) -> float:
    """The time of a cell as reads of its bytes at the partition's bandwidth."""
    return 1.0 / float(cell["fraction_of_bandwidth"])


def _lead_row(cells: list[Cell]) -> Row:
    compared = [cell for cell in cells if cell.get("vs_best")]
    return _row(compared, settled, 1.0) | {
        "geomean": rounded(geomean(map(settled, compared))),
        "losing": sum(settled(cell) < 1.0 for cell in compared),
    }


def _row(
    cells: list[Cell], value: Callable[[Cell], float], target: float, *, at_most: bool = False
) -> Row:
    return worst_row(cells, value, target, _name, at_most=at_most, shown=3)


def _name(cell: Cell) -> dict[str, Any]:
    return {"name": cell["case"]["name"], "num_sms": cell["group_sms"]}
