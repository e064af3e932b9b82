"""Tables over all suites: targets, misses, provenance, and what the README opens with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from smkern.bench.gemm_rows import compared, settled_ratio
from smkern.bench.results import Results
from smkern.bench.rows import geomean, rows_in
from smkern.bench.runtime.cases import AIMS
from smkern.bench.tables.markdown import NOT_MEASURED, rows_or_none
from smkern.bench.tables.runtime import gains_by_limit

Suites = Mapping[str, Results]
Rows = dict[str, Mapping[str, Any]]

HEADLINE = ("qwen3-8b", 15.0)
"""The model and the TBT limit, ms, of the README's figure about the runtime."""
HEADLINES = {
    "partitions": ("partitions", "{bandwidth_tbps_16_sms:.2f} TB/s read by 16 SMs"),
    "gemm": (
        "gemm",
        "{geomean_vs_cublas smkern:.2f}x cuBLAS in geomean, worst {worst_vs_cublas smkern:.2f}x",
    ),
    "untuned": (
        "what-nobody-tuned",
        "new shapes: {untuned_dispatched_geomean:.2f}x cuBLAS, worst "
        "{untuned_dispatched_worst:.2f}x; without `cutlass` {untuned_geomean:.2f}x, "
        "{untuned_worst:.2f}x",
    ),
    "left_out": (
        "what-nobody-tuned",
        "cost model over tuned: {left_out_geomean:.3f} times, worst {left_out_worst:.2f}",
    ),
    "attention": (
        "attention",
        "decode {decode_geomean_vs_flashinfer:.2f}x FlashInfer in geomean, worst "
        "{decode_worst_vs_flashinfer:.2f}x",
    ),
    "ops": (
        "the-rest-of-a-layer",
        "at worst over the best peer: `add_rms_norm` {worst_vs_best add_rms_norm:.2f}x, "
        "`grouped_gemm` {worst_vs_best grouped_gemm:.2f}x, `sample` {worst_vs_best sample:.1f}x",
    ),
    "model": (
        "whole-models",
        "decode step {decode_over_floor_132_sms:.2f} times its floor on 132 SMs, "
        "{decode_over_floor_16_sms:.2f} on 16",
    ),
    "steps": (
        "what-nobody-tuned",
        "two more SMs: a step at most {decode_over_fewer_sms:.2f} times as long",
    ),
    "runtime": (
        "runtime-decode-beside-prefill",
        "{qwen3-8b mux_over_aggregated_15ms:.2f}x chunked prefill's prompts at 15 ms TBT",
    ),
}
"""Suite to (section of the results page, one line with values of its summary)."""


BEHIND = 0.95
"""A split with less than this of the prompt tokens of chunks is a loss."""


def headline(suites: Suites) -> str:
    """Three figures: against cuBLAS, against chunked prefill, and a loss."""
    gemm = compared(suites.get("gemm", Results()).cells, "smkern")
    gains = gains_by_limit(suites.get("runtime", Results()).cells)
    gain = gains.get(HEADLINE, {})
    if not gemm or "value" not in gain:
        return NOT_MEASURED
    ratios = [settled_ratio(cell) for cell in gemm]
    own = [settled_ratio(cell) for cell in compared(suites["gemm"].cells, "smkern:triton")]
    without = f" ({geomean(own):.2f}x without the extra `cutlass`)" if own else ""
    budgets = sorted({cell["group_sms"] for cell in gemm})
    lines = [
        f"- **{geomean(ratios):.2f}x cuBLAS** in the same partition{without}: `gemm`, geomean "
        f"over {len(ratios)} cells, {budgets[0]} to {budgets[-1]} SMs; the worst cell "
        f"{min(ratios):.2f}x.",
        f"- **{gain['value']:.2f}x the prompt tokens** of chunked prefill beside 64 decoding "
        f"requests of {HEADLINE[0]}, at most {HEADLINE[1]:g} ms between two tokens "
        f"({AIMS[HEADLINE]:.2f}x was the aim).",
    ]
    found = [(f"{model} at {limit:g} ms", gain) for (model, limit), gain in gains.items()]
    lost = [
        f"{where} (chunks: {gain['aggregated_tokens_per_ms']:.1f} prompt tokens/ms"
        f"{_in_median(gain)})"
        for where, gain in found
        if "aggregated_tokens_per_ms" in gain and "mux_tokens_per_ms" not in gain
    ]
    behind = [
        f"{where} ({gain['value']:.2f}x{_in_median(gain)})"
        for where, gain in found
        if gain.get("value", 1.0) < BEHIND
    ]
    ways = [
        f"{what} {', '.join(where)}"
        for what, where in (("no split keeps", lost), ("splits are slower for", behind))
        if where
    ]
    if ways:
        lines.append(f"- **A loss:** under tight limits chunked prefill wins: {'; '.join(ways)}.")
    return "\n".join(lines)


def _in_median(gain: Mapping[str, Any]) -> str:
    return ", in the median step" if gain["kept_by"] == "p50" else ""


def suites_table(suites: Suites) -> str:
    """A row a suite: what it found, and how many of its targets are met and missed."""
    rows = []
    for suite, (section, style) in HEADLINES.items():
        found = target_rows(suites.get(suite, Results()).summary)
        if found:
            met = [row.get("met") for row in found.values() if _judged(row)]
            values = defaultdict(lambda: nan, {name: row["value"] for name, row in found.items()})
            rows.append(
                [
                    f"[`{suite}`](bench/results/README.md#{section})",
                    style.format_map(values),
                    *(str(met.count(kind) or "") for kind in (True, False, None)),
                ]
            )
    return rows_or_none(["suite", "found", "met", "missed", "not measured"], rows)


def targets_table(suites: Suites) -> str:
    """Every row of every suite's summary that has a target, or could have one."""
    rows = [
        [f"{suite}: {name}", _number(row["value"]), _number(row["target"]), _met(row)]
        for suite, results in suites.items()
        for name, row in target_rows(results.summary).items()
    ]
    return rows_or_none(["what", "value", "target", ""], rows)


def gpus_table(gpus: Sequence[Suites]) -> str:
    """What GPUs have of the first one's targets, where any other has something, too."""
    rows = []
    for suite in gpus[0]:
        mine, *theirs = [target_rows(x.get(suite, Results()).summary) for x in gpus]
        for name, row in mine.items():
            values = [_number(found.get(name, {}).get("value")) for found in theirs]
            if any(values):
                rows.append([f"{suite}: {name}", _number(row["value"]), *values])
    return rows_or_none(["what", *map(_gpu, gpus)], rows)


def _gpu(suites: Suites) -> str:
    named = {str(results.meta.get("gpu", "")) for results in suites.values()}
    return ", ".join(sorted(named)).replace("NVIDIA ", "")


def target_rows(summary: Mapping[str, Any]) -> Rows:
    """The rows of a summary that have a target, by their path in it."""
    return {name: row for name, row in rows_in(summary) if "target" in row}


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value or "")


def _judged(row: Mapping[str, Any]) -> bool:
    """Whether a row is met, missed or not measured: none of these is a value without a target, nor
    a ratio over a peer that missed the limit."""
    return row["target"] is not None or (row["value"] is None and not row.get("missed"))


def _met(row: Mapping[str, Any]) -> str:
    if not _judged(row):
        return "the peer missed it" if row["value"] is None else ""
    return {True: "met", False: "**missed**", None: "not measured"}[row.get("met")]


def provenance_table(suites: Suites) -> str:
    """Where each file was measured, when, and with what."""
    rows = []
    for suite, results in suites.items():
        meta = results.meta
        versions = [str(meta.get(name) or "?") for name in ("gpu", "driver", "torch", "triton")]
        date, commit = str(meta.get("date", "?"))[:10], str(meta.get("smkern_commit", "?"))
        rows.append([f"`{suite}.json`", *versions, date, f"`{commit}`", str(len(results.cells))])
    head = ["file", "GPU", "driver", "torch", "Triton", "date", "commit", "cells"]
    return rows_or_none(head, rows)
