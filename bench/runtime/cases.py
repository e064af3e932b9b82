"""What the runtime suite measures: models, limits, rungs, chunks, and the shape of its cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from smkern.bench.rows import Cell
from smkern.bench.suite import known_names
from smkern.measure.provenance import chip

OP = "runtime"
OURS, STOCK = "smkern", "stock"
"""Providers: both sides with our kernels; both with cuBLAS's, FlashInfer's and torch's."""

STEADY, PACED, AGGREGATED = "steady", "paced", "aggregated"
ALONE, QUEUES = "prefill_alone", "shared_queue"
"""Names of the cells that the summary's rows are computed from."""
OVERHEAD, HOST, SWITCH = "layerwise_overhead_fraction", "host_us_per_step", "switch_us"
MIXED = "mixed_forward"
HANDOVER, MEMORY = "switch_handover_us", "graph_memory_mib"
MISMATCHES, ABLATION = "token_mismatches", "ablation"
SERVED_RATE, SERVED_TRY = "served", "served_try"
SOAK_MINUTES, SOAK_LEAKS = "soak_minutes", "soak_leaks"


def gap_name(ahead: int) -> str:
    """Share of a decode step in which its stream has no kernel, with so many steps launched."""
    return f"decode_gap_fraction_k{ahead}"


GAIN = "mux_over_aggregated_"


def gain_name(limit_ms: float) -> str:
    """Prefill tokens per ms beside decode, over those of chunked prefill, under a TBT limit."""
    return f"{GAIN}{limit_ms:g}ms"


@dataclass(frozen=True, slots=True)
class RuntimePlan:
    """What is measured of one model.

    Attributes:
        model: A preset's name.
        limits_ms: TBT limits.
        rungs: SMs of the decode side; a step beside a prompt keeps each limit on one of them.
        chunk_rows: Rows of a mixed forward (a chunk and the decode batch) that are tried.
        batch: Requests that decode.
        context: Keys of each.
        tokens: Tokens of a prompt.
        paced: Rungs on which decode is tried a step each limit, with pauses in between.
        served_ms: TBT limits under which policies serve.
        served_chunks: Chunks among which the best is searched then; none: `chunks`.
        served_pages: Pages of the pool that requests are served from; 0: none are.
    """

    model: str
    limits_ms: tuple[float, ...]
    rungs: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    batch: int = 64
    context: int = 2048
    tokens: int = 4096
    paced: tuple[int, ...] = ()
    served_ms: tuple[float, ...] = ()
    served_chunks: tuple[int, ...] = ()
    served_pages: int = 0

    @property
    def chunks(self) -> tuple[int, ...]:
        """New tokens of a prompt in each of these forwards."""
        return tuple(rows - self.batch for rows in self.chunk_rows if rows > self.batch)

    def cell(self, name: str, provider: str, value: Any, unit: str, **more: Any) -> Cell:
        """A cell of the results; `more` is what else its case says."""
        case = {"model": self.model, "name": name, **more}
        cell = {"op": OP, "case": case, "provider": provider, "value": value, "unit": unit}
        return cell | chip()


ROWS_8B = (
    *range(80, 128, 16), *range(128, 513, 32), *range(576, 769, 64), *range(896, 1281, 128),
    *range(1536, 2305, 256),
)  # fmt: skip
ROWS_32B = (*range(80, 128, 16), *range(128, 385, 32), *range(448, 897, 64), 1024)
PLANS = (
    RuntimePlan(
        "qwen3-8b",
        (12, 15, 20, 30, 50),
        (10, 14, 20, 22, 24, 26, 28, 30, 32, 36, 40, 44, 46, 48, 50, 52, 54, 56, 60, 64, 72, 80),
        ROWS_8B,
        paced=(20, 24, 32),
        served_ms=(15, 20, 30),
        served_chunks=(*range(16, 513, 16), *range(544, 1025, 32), *range(1088, 2241, 64)),
        served_pages=20_000,
    ),
    RuntimePlan(
        "qwen3-32b",
        (35, 50, 100),
        (14, 16, 24, 32, 36, 38, 40, 42, 44, 48, 56, 64, 72, 80, 88, 96),
        ROWS_32B,
        paced=(24, 32),
        served_ms=(40, 50, 80),
        served_chunks=(*range(32, 513, 32), *range(576, 1217, 64)),
        served_pages=11_000,
    ),
)
_QWEN3_14B = RuntimePlan(
    "qwen3-14b",
    (20, 30, 50),
    (14, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 72, 80),
    ROWS_32B,
    served_ms=(30, 40, 60),
    served_chunks=(*range(32, 513, 32), *range(576, 1025, 64), *range(1152, 2241, 128)),
    served_pages=12_000,
)
_QWEN3_30B = replace(
    _QWEN3_14B, model="qwen3-30b-a3b", limits_ms=(30, 40, 60), served_ms=(40, 60),
    served_chunks=(*range(64, 1025, 64), *range(1152, 4097, 128)), served_pages=10_400,
)  # fmt: skip
MORE_PLANS = (
    _QWEN3_14B,
    _QWEN3_30B,
    replace(_QWEN3_30B, model="qwen3-30b-a3b-fp8"),
    replace(PLANS[0], model="qwen3-8b-fp8", limits_ms=(10, 15, 20), served_ms=(10, 15, 20)),
    replace(PLANS[1], model="qwen3-32b-fp8", limits_ms=(30, 50), served_ms=(30, 50)),
)  # fmt: skip
"""Measured where they are named."""
AIMS = {("qwen3-8b", 15.0): 1.5, ("qwen3-8b", 20.0): 1.3, ("qwen3-32b", 50.0): 1.3}
"""Target of a gain, by model and TBT limit."""
STOCK_RUNGS = {
    "qwen3-8b": (16, 24, 32, 40, 48, 56, 64, 72, 80),
    "qwen3-32b": (16, 24, 32, 40, 48, 64, 72, 80),
}
"""Rungs of the driver's own groups of 8 SMs, where stock kernels run best."""
SWITCH_RUNGS = (24, 40)
GAP_RUNG = 40


def plans_named(names: str | Iterable[str]) -> tuple[RuntimePlan, ...]:
    """The plans of some models.

    Raises:
        UnknownNameError: a model that has no plan.
    """
    known = {plan.model: plan for plan in (*PLANS, *MORE_PLANS)}
    return tuple(known[name] for name in known_names(names, known, "model"))
