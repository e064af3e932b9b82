"""Policies on stock kernels, beside the table's: chunked prefill is what users have today."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from smkern.bench.results import FOLDER, load_results
from smkern.bench.runtime.cases import plans_named
from smkern.errors import TableError
from smkern.latency import TablePredictor
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import Timing
from smkern.models.presets import preset
from smkern.profile import load_profile

STOCK = "stock_"
"""In front of a policy's name: it is served with the times of `stock_predictor`."""
ON_STOCK = tuple(STOCK + name for name in ("chunked", "adaptive"))
"""What the table has: what users have, and what a split would give them without our kernels."""
PROMPT = 4096
"""Tokens of the prompts that the runtime suite times alone."""


@lru_cache(maxsize=2)
def stock_predictor(model: str, gpu: str) -> TablePredictor:
    """How long stock kernels take (cuBLAS, FlashInfer, elementwise torch).

    The runtime suite times one decode batch and prompts of 4,096: both alone, in one forward, and
    beside each other on some rungs. Other sizes follow from these by the table's own rules, as for
    smkern's kernels.

    Raises:
        TableError: the results have no such times of this model on this GPU.
    """
    path = FOLDER / gpu / "runtime.json"
    results = load_results(path)
    timings = stock_timings(model, results.cells, results.meta["num_sms"], path)
    return TablePredictor(timings, ModelSizes.of(preset(model)), load_profile(gpu))


def stock_timings(
    model: str, cells: Iterable[dict[str, Any]], num_sms: int, path: Path
) -> dict[Timing, float]:
    """The times of stock kernels among a results file's cells, us."""
    (plan,) = plans_named([model])
    found: dict[Timing, float] = {}
    for cell in cells:
        case = cell["case"]
        if cell["provider"] != "stock" or case.get("model") != model:
            continue
        if case["name"] == "prefill_alone":
            found[Timing("prefill", num_sms, prompts=1, tokens=PROMPT)] = (
                1e3 * PROMPT / cell["value"]
            )
            step = Timing("decode", num_sms, batch=plan.batch, context=plan.context)
            found[step] = 1e3 * cell["decode_ms"]
        elif case["name"] == "steady":
            found |= _beside(cell, plan.batch, plan.context, num_sms)
        elif case["name"] == "mixed_forward":
            for start, ms in cell["by_start_ms"].items():
                both = Timing(
                    "mixed", num_sms, plan.batch, plan.context, 1, cell["chunk"], int(start)
                )
                found[both] = 1e3 * ms
    if not any(timing.kind == "mixed" for timing in found):
        raise TableError(
            f"{path} has no forwards of {model!r} on stock kernels: measure them with smkern bench "
            f"runtime --models {model} --only stock"
        )
    return found


def _beside(cell: dict[str, Any], batch: int, context: int, num_sms: int) -> dict[Timing, float]:
    """A decode step alone on a rung and beside prompts, and these."""
    rung = cell["case"]["rung"]
    rest = num_sms - rung
    step = Timing("decode", rung, batch=batch, context=context)
    slowed = replace(step, beside_sms=rest, beside_tokens=PROMPT)
    prompt = Timing(
        "prefill", rest, prompts=1, tokens=PROMPT, beside_sms=rung, beside_batch=batch,
        beside_context=context,
    )  # fmt: skip
    return {
        step: 1e3 * cell["alone_ms"],
        slowed: 1e3 * cell["tbt_p50_ms"],
        prompt: 1e3 * PROMPT / cell["value"],
    }
