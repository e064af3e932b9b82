"""The table of `engines.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.engines.cases import LIMITS_MS
from smkern.bench.tables.markdown import rows_or_none

NAMES = {
    "vllm": "vLLM, stock",
    "vllm+smkern": "vLLM, smkern's attention",
    "vllm+linear": "vLLM, + linear layers",
    "vllm-fp8": "vLLM in fp8, stock",
    "vllm-fp8+linear": "vLLM in fp8, + attention and linear layers",
    "smkern-fp8": "smkern in fp8",
    "smkern": "smkern's `Multiplexer`",
}
LATE = "**"
"""Around a 99th percentile that missed the limit."""


def engines_table(cells: Iterable[dict[str, Any]]) -> str:
    """A row an engine and limit: tokens of prompts, times between tokens, and its one setting."""
    served = [cell for cell in cells if cell["case"]["name"] == "served" and "error" not in cell]
    served.sort(key=lambda cell: (*_load(cell), [*NAMES].index(cell["provider"])))
    rows = [
        [
            f"{_under(cell)}: {NAMES[cell['provider']]}",
            f"{cell['value']:.1f}",
            f"{cell['tbt_p50_ms']:.1f}",
            _late(cell),
            _setting(cell),
            "" if cell.get("watts") is None else f"{cell['watts']:.0f}",
        ]
        for cell in served
    ]
    head = ["model, limit: engine", "prompt tokens/ms", "TBT p50, ms", "p99", "setting", "W"]
    return rows_or_none(head, rows)


def alone_table(cells: Iterable[dict[str, Any]]) -> str:
    """Decode steps and prompts by themselves."""
    found = {
        (cell["case"]["model"], cell["provider"], cell["case"]["name"]): f"{cell['value']:.2f}"
        for cell in cells
        if "error" not in cell
    }
    rows = [
        [
            f"{model}: {title}",
            *(found.get((model, name, x), "") for x in ("decode_alone", "prefill_alone")),
        ]
        for model in dict.fromkeys(model for model, _, _ in found)
        for name, title in NAMES.items()
        if (model, name, "decode_alone") in found
    ]
    return rows_or_none(["model: engine", "decode step, ms", "prompts alone, tokens/ms"], rows)


def window_table(cells: Iterable[dict[str, Any]]) -> str:
    """A row an engine, policy and order: the goodput of a trace's window, and what it was like."""
    served = [cell for cell in cells if cell["case"]["name"] == "window" and "error" not in cell]
    served.sort(key=lambda x: (*_load(x), [*NAMES].index(x["provider"]), -x["value"]))
    rows = [
        [
            f"{_under(cell)}: {NAMES[cell['provider']]}, {_decides(cell)}",
            f"{cell['value']:.1f}",
            *(f"{cell['tbt_ms'][name]:.1f}" for name in ("p50", "p99")),
            *(f"{cell['ttft_ms'][name]:.0f}" for name in ("p50", "p99")),
            "steady" if cell["is_stable"] else "still grew",
        ]
        for cell in served
    ]
    times = ["TBT p50, ms", "p99", "TTFT p50, ms", "p99"]
    head = ["model, limit: engine", "requests/s", *times, "queue"]
    return rows_or_none(head, rows)


def _decides(cell: dict[str, Any]) -> str:
    if "budget" in cell:
        return f"{cell['budget']} tokens a step"
    return f"`{cell['case']['policy']}`, `{cell['case']['order']}`"


def _load(cell: dict[str, Any]) -> tuple[int, float]:
    return [*LIMITS_MS].index(cell["case"]["model"]), _limit_ms(cell)


def _under(cell: dict[str, Any]) -> str:
    return f"{cell['case']['model']}, {_limit_ms(cell):g} ms"


def _limit_ms(cell: dict[str, Any]) -> float:
    return float(cell["case"]["limit"].removesuffix("ms"))


def _late(cell: dict[str, Any]) -> str:
    p99 = f"{cell['tbt_p99_ms']:.1f}"
    return f"{LATE}{p99}{LATE}" if cell["tbt_p99_ms"] > _limit_ms(cell) else p99


def _setting(cell: dict[str, Any]) -> str:
    return f"{cell['budget']} tokens a step" if "budget" in cell else "the limit"
