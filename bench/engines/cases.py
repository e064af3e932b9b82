"""What the engines suite measures: who serves, under which limits, and the shape of its cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.bench.rows import Cell

OP = "engine"
VLLM, ATTENTION, LINEAR, OURS = "vllm", "vllm+smkern", "vllm+linear", "smkern"
FP8, FP8_LINEAR, OURS_FP8 = "vllm-fp8", "vllm-fp8+linear", "smkern-fp8"
PROVIDERS = (VLLM, ATTENTION, LINEAR, FP8, FP8_LINEAR, OURS, OURS_FP8)
"""Stock vLLM; with smkern's attention; with its linear layers as well; the first and the third with
weights in fp8, scales of blocks; smkern's `Multiplexer`, and with such weights."""
STOCK = {OURS: VLLM, ATTENTION: VLLM, LINEAR: VLLM, FP8_LINEAR: FP8, OURS_FP8: FP8}
"""Whom an engine is compared with."""
OWN = {OURS: "", OURS_FP8: "-fp8"}
"""The `Multiplexer`'s, and what the name of their preset ends with."""

SERVED, TRY = "served", "served_try"
DECODE, PREFILL = "decode_alone", "prefill_alone"
WINDOW, WINDOW_TRY = "window", "window_try"


LIMITS_MS: dict[str, tuple[float, ...]] = {
    "qwen3-8b": (15, 20, 30), "qwen3-32b": (40, 60), "qwen3-30b-a3b": (30, 40),
}  # fmt: skip
"""Models that are served, and their limits where none are named."""
BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}  # fmt: skip
"""What Qwen3's checkpoints in fp8 say of themselves."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """What vLLM's scheduler is told: tokens of a step, decode rows included."""

    tokens: int


def vllm_options(provider: str) -> dict[str, Any]:
    """What `vllm.LLM` is started with."""
    options: dict[str, dict[str, Any]] = {VLLM: {}, ATTENTION: {"attention_backend": "CUSTOM"}}
    options[LINEAR] = options[ATTENTION] | {"quantization": "smkern"}
    options[FP8] = {"hf_overrides": {"quantization_config": {**BLOCKS}}}  # vLLM adds entries
    options[FP8_LINEAR] = options[LINEAR] | options[FP8]
    return options[provider]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests that decode all the time, and prompts that come one behind another beside them.

    Attributes:
        model: A preset's name.
        rows: Requests that decode.
        context: Mean of their keys while they are watched.
        prompt: Tokens of the prompts that come; each draws one token.
        limits_ms: Limits of the 99th percentile of a row's time between tokens.
        budgets: Token budgets of a step, rows included, among which vLLM's best is searched.
    """

    model: str = "qwen3-8b"
    rows: int = 64
    context: int = 2048
    prompt: int = 4096
    limits_ms: tuple[float, ...] = LIMITS_MS["qwen3-8b"]
    budgets: tuple[int, ...] = tuple(range(112, 2049, 16))

    def cell(self, name: str, provider: str, value: float, unit: str, **more: Any) -> Cell:
        """A cell of the results; `more` is what else its case says."""
        sizes = {"rows": self.rows, "context": self.context, "prompt": self.prompt}
        case = {"model": self.model, "name": name, **sizes, **more}
        return {"op": OP, "case": case, "provider": provider, "value": value, "unit": unit}
