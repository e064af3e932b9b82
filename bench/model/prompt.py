"""A whole prompt layer by layer, and its four GEMMs by themselves, by turns in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smkern import ops
from smkern.bench.model.model import Model
from smkern.measure.partitions import Place
from smkern.measure.timing import Timing
from smkern.models import Step
from smkern.models.activations import QuantizedRows
from smkern.models.layers import DenseLayer, Layer, Scales

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
        with torch.cuda.stream(place.stream):
            run()
        torch.cuda.synchronize()
    if not bool(torch.isfinite(step.buffers.logits).all()):
        raise ValueError(f"{model.plan.model}, a prompt: logits are not finite")
    with torch.cuda.stream(place.stream):
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
    layers, config, tokens = model.decoder.weights.layers, model.config, step.num_tokens
    pairs = config.hidden_size * (config.qkv_size + config.q_size)
    if config.moe is None:
        pairs += 3 * config.hidden_size * config.intermediate_size
    run = _in_fp8 if config.quantization is not None else _in_the_models_dtype
    products = run(model, step)
    return lambda index: products(layers[index]), 2 * tokens * pairs


def _in_the_models_dtype(model: Model, step: Step) -> Callable[[Layer], None]:
    b, wide = step.buffers, _wide(model, step)

    def run(layer: Layer) -> None:
        ops.gemm(b.normed, layer.qkv, out=b.qkv, static_weights=True)
        ops.gemm(b.attended_rows, layer.o, out=b.hidden, static_weights=True)
        if isinstance(layer, DenseLayer):
            assert b.gated is not None
            ops.gemm(b.normed, layer.gate_up, out=wide, static_weights=True)
            ops.gemm(b.gated, layer.down, out=b.hidden, static_weights=True)

    return run


def _in_fp8(model: Model, step: Step) -> Callable[[Layer], None]:
    """The same of a quantized model, whose inputs are in e4m3 already."""
    b, wide = step.buffers, _wide(model, step)

    def product(x: QuantizedRows | None, w: Tensor, scales: Scales | None, out: Any) -> None:
        assert x is not None
        assert scales is not None
        ops.gemm(x.values, w, a_scale=x.scale, w_scale=scales.weight, out=out, static_weights=True)

    def run(layer: Layer) -> None:
        scales, x = layer.scales, b.fp8
        product(x.hidden, layer.qkv, scales.qkv, b.qkv)
        product(x.attended, layer.o, scales.o, b.hidden)
        if isinstance(layer, DenseLayer):
            product(x.hidden, layer.gate_up, scales.gate_up, wide)
            product(x.gated, layer.down, scales.down, b.hidden)

    return run


def _wide(model: Model, step: Step) -> Any:
    """Room for the gate and up of a dense MLP; None of experts."""
    config = model.config
    if config.moe is not None:
        return None
    shape = (step.num_tokens, 2 * config.intermediate_size)
    return torch.empty(shape, dtype=config.dtype, device=model.device)
