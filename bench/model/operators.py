"""Each operator of a decode step by itself, on layer after layer's weights and caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from smkern import ops
from smkern.bench.model.model import DecodeLoop, Model, draw_of
from smkern.latency.cost import Load, kernels_of
from smkern.measure.timing import Call
from smkern.models import ModelConfig

OPERATORS = (
    "embedding", "gemm", "gemm_swiglu", "grouped_gemm", "moe_permute", "moe_unpermute",
    "paged_attention", "qk_norm_rope_append", "quantize", "rms_norm", "topk_softmax",
)  # fmt: skip
"""What a decoder calls of `smkern.ops`; all of them write where they are told to."""

Operation = tuple[str, Callable[[], Any]]
"""An operator's name, and the call."""


def operator_calls(model: Model, loop: DecodeLoop) -> dict[str, Call]:
    """Name, as in `smkern.latency.cost.kernels_of`, to call(i) on layer i modulo the layers.

    They are the decoder's own calls, on the buffers as the loop's last step left them. Without a
    floor are "plan", "embedding", and in a quantized model "quantize x", a pass over x's input.
    """
    step, decoder = loop.step, model.decoder
    names = _names(model.config)
    layers = [
        _named(_calls_of(partial(decoder.layer, index, step)), names["layer"])
        for index in range(model.config.num_layers)
    ]
    once: dict[str, Callable[[], Any]] = {"plan": partial(step.planned, out=step.plan)}
    once |= _named(_calls_of(partial(decoder.embed, step)), ["embedding"])
    once |= _named(_calls_of(partial(decoder.head, step)), names["head"])
    once["sample"] = partial(draw_of(loop.graph.inputs), step.buffers.logits)
    found = {name: [layer[name] for layer in layers] for name in layers[0]}
    found |= {name: [call] for name, call in once.items()}
    return {name: partial(_by_turns, calls) for name, calls in found.items()}


def _calls_of(run: Callable[[], Any]) -> list[Operation]:
    """The operators that `run` calls, which are not run."""
    found: list[Operation] = []

    def noted(name: str) -> Callable[..., None]:
        operator = getattr(ops, name)

        def note(*args: Any, **options: Any) -> None:
            found.append((name, partial(operator, *args, **options)))

        return note

    with patch.dict(vars(ops), {name: noted(name) for name in OPERATORS}):
        run()
    return found


def _names(config: ModelConfig) -> dict[str, list[str]]:
    """Names of a layer's kernels and of those behind the layers, in their order."""
    kernels = [k.name for k in kernels_of(config, Load(1, 1, 1, 1, ends=False), l2_bytes=0)]
    behind = kernels.index("final_norm")
    return {"layer": kernels[:behind], "head": kernels[behind : kernels.index("sample")]}


def _named(calls: Sequence[Operation], names: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Calls by these names, one for each but passes that quantize what the next one reads."""
    left, found = list(names), {}
    for operator, call in calls:
        found[f"quantize {left[0]}" if operator == "quantize" else left.pop(0)] = call
    assert not left
    return found


def _by_turns(calls: Sequence[Callable[[], Any]], i: int) -> None:
    calls[i % len(calls)]()
