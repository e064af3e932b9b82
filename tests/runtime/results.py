"""Rows of `runtime.json` that tests measure: `SMKERN_RESULTS` names the file that gets them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from smkern.bench.results import open_results
from smkern.bench.runtime.cases import (
    MISMATCHES,
    OURS,
    PLANS,
    SOAK_LEAKS,
    SOAK_MINUTES,
    Cell,
)
from smkern.bench.runtime.rows import renew, summarize
from smkern.measure.provenance import collect_meta
from tests.runtime.equality import Equality, Verdict
from tests.runtime.soak import Soak

(PLAN,) = (plan for plan in PLANS if plan.model == "qwen3-8b")


def token_cell(wanted: Equality, verdict: Verdict) -> Cell:
    """`token_mismatches`: tokens that differ from those of each request alone."""
    value = verdict.mismatches + len(verdict.failed)
    cell = PLAN.cell(MISMATCHES, OURS, value, "tokens", **wanted.about)
    cell |= {"tokens": verdict.tokens, "failed": verdict.failed[:4]}
    cell |= {"seconds": round(verdict.seconds, 1)}
    if wanted.is_fast:
        return cell | {"clear": verdict.clear}
    return cell | {
        "cancelled": verdict.cancelled,
        "preemptions": verdict.preemptions,
        "switches": verdict.switches,
        "wrong": [list(pair) for pair in verdict.wrong][:8],
    }


def soak_cells(state: Soak, layers: int) -> list[Cell]:
    """`soak_minutes` and `soak_leaks`; None leaks: no segment was long enough to tell."""
    segments = state.segments
    counts = ("requests", "tokens", "cancelled", "preemptions", "switches")
    about = {
        "segments": len(segments),
        "unjudged_minutes": round(state.unjudged_minutes, 2),
        **{name: sum(getattr(segment, name) for segment in segments) for name in counts},
        "longest_quiet_s": round(max(segment.longest_quiet_s for segment in segments), 3),
        "layers": layers,
    }
    leaks = state.leaks
    is_known = leaks or any(segment.is_judged for segment in segments)
    return [
        PLAN.cell(SOAK_MINUTES, OURS, round(state.minutes, 2), "minutes") | about,
        PLAN.cell(SOAK_LEAKS, OURS, len(leaks) if is_known else None, "leaks")
        | about
        | {"leaks": leaks[:8]},
    ]


def record(cells: Iterable[Cell], path: str | None = os.environ.get("SMKERN_RESULTS")) -> None:
    """Put cells into the results file that was asked for, if any, and make its summary anew."""
    if path is None:
        return
    results = open_results(Path(path), resume=True, meta=collect_meta())
    for cell in cells:
        results.add(cell)
    renew(results)
    results.summary = summarize(results.cells)
    results.save(Path(path))
