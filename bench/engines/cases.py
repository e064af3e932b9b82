"""What the engines suite measures: who serves, under which limits, and the shape of its cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Cell = dict[str, Any]

OP = "engine"
VLLM, ATTENTION, WORKER, OURS = "vllm", "vllm+smkern", "vllm+worker", "smkern"
PROVIDERS = (VLLM, ATTENTION, WORKER, OURS)
"""Stock vLLM; with smkern's attention; with its worker as well; smkern's `Multiplexer`."""
ENGINES = (VLLM, ATTENTION, *(f"{WORKER}:{sms}" for sms in (40, 52, 64)), OURS)
"""What is measured: the worker with some counts of SMs for its decode rows."""

SERVED, TRY = "served", "served_try"
DECODE, PREFILL = "decode_alone", "prefill_alone"


def vllm_options(provider: str, decode_sms: int | None = None) -> dict[str, Any]:
    """What `vllm.LLM` is started with."""
    options: dict[str, dict[str, Any]] = {VLLM: {}, ATTENTION: {"attention_backend": "CUSTOM"}}
    options[WORKER] = options[ATTENTION] | {
        "quantization": "smkern",
        "worker_cls": "smkern.integrations.vllm.worker.Worker",
        "additional_config": {"smkern_decode_sms": decode_sms},
    }
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
    limits_ms: tuple[float, ...] = (15, 20, 30)
    budgets: tuple[int, ...] = tuple(range(112, 1025, 16))

    def cell(self, name: str, provider: str, value: float, unit: str, **more: Any) -> Cell:
        """A cell of the results; `more` is what else its case says."""
        sizes = {"rows": self.rows, "context": self.context, "prompt": self.prompt}
        case = {"model": self.model, "name": name, **sizes, **more}
        return {"op": OP, "case": case, "provider": provider, "value": value, "unit": unit}
