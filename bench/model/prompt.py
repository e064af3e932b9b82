"""A whole prompt layer by layer, and its four GEMMs by themselves, by turns in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from smkern import ops
from smkern.bench.model.model import Model
from smkern.measure.partitions import Place
from smkern.measure.timing import Timing, current_stream
from smkern.models import Step
from smkern.models.layers import DenseLayer

ROUNDS = 2
"""Measured passes of each; one more goes before them."""


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Microseconds of whole passes, of the GEMMs of all layers, and these GEMMs' FLOPs."""

    whole: Timing
    gemms: Timing
    gemm_flops: int


def time_prompt(
    model: Model, step: Step, place: Place, while_busy: Callable[[], None]
) -> PromptTimes:
    """Time embed, layers and head of a planned step, and the GEMMs of its layers.

    The device is behind the host by layers of milliseconds each, so no launch gap is timed but a
    pass's first. The GEMMs read what the layers left: no zeros.
    """
    gemms, flops = layer_gemms(model, step)
    layers = range(model.config.num_layers)

    def whole() -> None:
        model.decoder.forward(step)

    def products() -> None:
        for index in layers:
            gemms(index)

    found: dict[str, list[tuple[Any, Any]]] = {"whole": [], "gemms": []}
    for run in (whole, products):  # compiles and loads
        with current_stream(place.stream):
            run()
        torch.cuda.synchronize()
    if not bool(torch.isfinite(step.buffers.logits).all()):
        raise ValueError(f"{model.plan.model}, a prompt: logits are not finite")
    with current_stream(place.stream):
        for index in range(ROUNDS + 1):
            for name, run in (("whole", whole), ("gemms", products)):
                span = _timed(run, place.stream)
                if index:
                    found[name].append(span)
    while_busy()
    torch.cuda.synchronize()
    timings = {
        name: Timing(tuple(1e3 * begin.elapsed_time(end) for begin, end in spans))
        for name, spans in found.items()
    }
    return PromptTimes(timings["whole"], timings["gemms"], flops * len(layers))


def _timed(run: Callable[[], None], stream: Any) -> tuple[Any, Any]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    run()
    end.record(stream)
    return begin, end


def layer_gemms(model: Model, step: Step) -> tuple[Callable[[int], None], int]:
    """What runs the GEMMs of one layer with nothing fused to them, and their FLOPs a layer.

    Of a mixture of experts those outside the experts.
    """
    b, layers = step.buffers, model.decoder.weights.layers
    config, tokens = model.config, step.num_tokens
    pairs = config.hidden_size * (config.qkv_size + config.q_size)
    wide: Any = None
    if config.moe is None:
        inner = config.intermediate_size
        pairs += 3 * config.hidden_size * inner
        wide = torch.empty(tokens, 2 * inner, dtype=config.dtype, device=model.device)

    def run(index: int) -> None:
        layer = layers[index]
        ops.gemm(b.normed, layer.qkv, out=b.qkv, static_weights=True)
        ops.gemm(b.attended_rows, layer.o, out=b.hidden, static_weights=True)
        if isinstance(layer, DenseLayer):
            assert b.gated is not None
            ops.gemm(b.normed, layer.gate_up, out=wide, static_weights=True)
            ops.gemm(b.gated, layer.down, out=b.hidden, static_weights=True)

    return run, 2 * tokens * pairs
