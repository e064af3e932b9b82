"""What the suite asks of vLLM's engine core, in the process that the core has to itself.

vLLM imports this module there, for it is named as an extension of its workers.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.engine.core import EngineCore

SCALE = 2.0**-10


class Extension:
    """What a worker can be asked."""

    def draw_weights(self: Any) -> None:
        """As `smkern.models.Weights.random` does: what the GEMMs burn depends on them.

        In fp8 too: weights over their scales, which are powers of two as some kernels have them.
        """
        model = self.get_model()
        draw = torch.Generator(next(model.parameters()).device).manual_seed(0)
        for name, parameter in model.named_parameters():
            if parameter.dtype is torch.float8_e4m3fn:
                drawn = torch.empty(parameter.shape, device=parameter.device)
                parameter.data.copy_(drawn.normal_(0.0, 0.02 / SCALE, generator=draw))
            elif "_scale" in name:
                parameter.data.fill_(SCALE)
            elif parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.02, generator=draw)
            else:
                parameter.data.fill_(1.0)


def set_token_budget(core: Any, tokens: int) -> None:
    """From the next step on: tokens of a step, decode rows included."""
    core.scheduler.max_num_scheduled_tokens = tokens


def taken_steps(core: Any) -> list[tuple[float, int, int]]:
    """When each step since the last call ended, its decode rows, its tokens of prompts.

    Noted from the first call on. Decode rows are of requests whose names begin by "d", prompts
    those of "p".
    """
    noted: list[tuple[float, int, int]] | None = getattr(core, "noted_steps", None)
    if noted is None:
        noted = core.noted_steps = []
        core.scheduler.update_from_output = _noting(core.scheduler.update_from_output, noted)
    found = noted[:]
    noted.clear()
    return found


def _noting(update: Any, noted: list[tuple[float, int, int]]) -> Any:
    def updated(output: Any, *rest: Any, **named: Any) -> Any:
        made = update(output, *rest, **named)
        counts = output.num_scheduled_tokens
        rows = sum(n == 1 and name.startswith("d") for name, n in counts.items())
        tokens = sum(n for name, n in counts.items() if name.startswith("p"))
        noted.append((time.perf_counter(), rows, tokens))
        return made

    return updated


EngineCore.set_token_budget = set_token_budget
EngineCore.taken_steps = taken_steps
