"""Cells of the suite of several GPUs, and what its summary says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from smkern.bench.rows import Cell, rounded, target_row, worst_row
from smkern.measure.partitions import Place
from smkern.measure.timing import Timing

SUMMED, GATHERED, DECODE, PREFILL = "summed_rms_norm", "gathered_logits", "decode_step", "prefill"
SERVED, TRIED = "served_beside", "served_try"
RANDOM_STEPS, TOKENS = "random_steps", "token_mismatches"
STEP_US, STEP_RATIO, PREFILL_RATIO = 15.0, 0.60, 1.75
ONE_GPU_MS = {30: 51, 50: 86}
"""Limits of one GPU of which a decode step takes the same share as of two GPUs' limits: it takes
0.58 to 0.61 of the time there."""
LARGE_STEP = 512 * 1024
"""Bytes of a decode step's sum that the limit is for."""


def cell(ranks: int, op: str, case: Cell, place: Place, provider: str, timing: Timing) -> Cell:
    """A call's time on rank 0."""
    head = {"op": op, "case": {**case, "ranks": ranks}, "num_sms": place.num_sms}
    return head | {
        "mode": place.mode, "provider": provider, "us": round(timing.us_median, 2),
        "noise": round(timing.noise, 4),
    }  # fmt: skip


def counted(ranks: int, op: str, case: Cell, value: Any, unit: str, **more: Any) -> Cell:
    """A figure of a run: what was served, or how many tokens differ."""
    return {
        "op": op, "case": {**case, "ranks": ranks}, "provider": "smkern", "value": value,
        "unit": unit, **more,
    }  # fmt: skip


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """The rows of the file."""
    steps = [c for c in _of(cells, SUMMED, "smkern") if _bytes(c) == LARGE_STEP]
    found: dict[str, Any] = {
        "sum_512k_us": worst_row(steps, lambda c: c["us"], STEP_US, _name, at_most=True),
        "sum_over_nccl": _beside(cells, SUMMED, 1.0),
        "gather_over_nccl": _beside(cells, GATHERED, 1.0),
    }
    for model in sorted({c["case"]["model"] for c in cells if c["op"] in (DECODE, PREFILL)}):
        found[f"{model}_decode_step_over_one_gpu"] = _over_one(
            cells, DECODE, model, lambda part, whole: part / whole, STEP_RATIO, at_most=True
        )
        found[f"{model}_prefill_over_one_gpu"] = _over_one(
            cells, PREFILL, model, lambda part, whole: whole / part, PREFILL_RATIO, at_most=False
        )
    served = _of(cells, SERVED)
    for limit in sorted({c["case"]["limit_ms"] for c in served if c["case"]["ranks"] > 1}):
        parts = [c for c in served if _under(c, limit, one_gpu=False)]
        whole = [c for c in served if _under(c, ONE_GPU_MS.get(limit), one_gpu=True)]
        found[f"multiplexed_over_chunked_{limit:g}ms"] = target_row(
            _gain(parts), rounded(_gain(whole)), len(parts)
        )
    different = [c["value"] for c in _of(cells, TOKENS)]
    found["token_mismatches"] = target_row(
        sum(different) if different else None, 0, len(different), at_most=True
    )
    stuck = [c["value"] for c in _of(cells, RANDOM_STEPS)]
    found["random_steps"] = target_row(max(stuck, default=None), 100_000, len(stuck))
    return found


def _of(cells: Iterable[Cell], op: str, provider: str | None = None) -> list[Cell]:
    return [c for c in cells if c["op"] == op and provider in (None, c["provider"])]


def _bytes(one: Cell) -> int:
    return 2 * int(one["case"]["rows"]) * int(one["case"]["hidden"])


def _name(one: Cell) -> Cell:
    return {**one["case"], "num_sms": one["num_sms"]}


def _beside(cells: Sequence[Cell], op: str, target: float) -> dict[str, Any]:
    """NCCL's time over ours."""
    theirs = {str(_name(c)): c["us"] for c in _of(cells, op, "nccl")}

    def ratio(one: Cell) -> float | None:
        us = theirs.get(str(_name(one)))
        return None if us is None else us / one["us"]

    return worst_row(_of(cells, op, "smkern"), ratio, target, _name)


def _over_one(
    cells: Sequence[Cell], op: str, model: str, ratio: Callable[[float, float], float],
    target: float, *, at_most: bool,
) -> dict[str, Any]:  # fmt: skip
    """Forwards of a part beside the whole model's on one GPU."""

    def key(one: Cell) -> str:
        case = {k: v for k, v in one["case"].items() if k != "ranks"}
        return str([case, one["num_sms"]])

    own = [c for c in _of(cells, op, "smkern") if c["case"]["model"] == model]
    whole = {key(c): c["us"] for c in own if c["case"]["ranks"] == 1}

    def value(one: Cell) -> float | None:
        us = whole.get(key(one))
        return None if us is None else ratio(one["us"], us)

    parts = [c for c in own if c["case"]["ranks"] > 1]
    return worst_row(parts, value, target, _name, at_most=at_most)


def _under(served: Cell, limit_ms: float | None, *, one_gpu: bool) -> bool:
    case = served["case"]
    return case["limit_ms"] == limit_ms and (case["ranks"] == 1) == one_gpu


def _gain(served: Sequence[Cell]) -> float | None:
    """Tokens per ms of a split's prompts over chunked prefill's, where both keep the limit."""
    rate = {
        c["case"]["policy"]: c["value"] for c in served if c["tbt_p99_ms"] <= c["case"]["limit_ms"]
    }
    ours, theirs = rate.get("static_split"), rate.get("chunked")
    return ours / theirs if ours and theirs else None
