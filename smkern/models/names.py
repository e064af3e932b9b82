"""Hugging Face's names of a decoder's tensors, as views of the fused weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from smkern.models.layers import Layer, MoeLayer

if TYPE_CHECKING:
    from smkern.models.weights import Weights

IGNORABLE = (r".*\.rotary_emb\.inv_freq", r".*\.(k|v)_scale", r".*\.masked_bias")
"""Names in checkpoints that are not read: values that config.json implies, scales of fp8 caches."""


def named_weights(weights: Weights) -> dict[str, Tensor]:
    """Views of all weights by their names in checkpoints."""
    found = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.final_norm}
    if weights.lm_head is not weights.embed:
        found["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        for name, tensor in _layer(weights, layer):
            found[f"model.layers.{index}.{name}"] = tensor
    return found


def fused_names(weights: Weights) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Tensors that replace several of `named_weights`, as transformers 5 stores experts.

    Returns:
        By name: our tensor, and the names that it replaces.
    """
    found: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
    for index, layer in enumerate(weights.layers):
        if isinstance(layer, MoeLayer):
            base = f"model.layers.{index}.mlp.experts"
            experts = range(layer.router.shape[0])
            halves = ("gate_proj", "up_proj")
            parts = tuple(f"{base}.{e}.{half}.weight" for e in experts for half in halves)
            downs = tuple(f"{base}.{e}.down_proj.weight" for e in experts)
            found[f"{base}.gate_up_proj"] = (layer.w_gate_up, parts)
            found[f"{base}.down_proj"] = (layer.w_down, downs)
    return found


def is_ignorable(name: str, weights: Weights) -> bool:
    """Whether a tensor that matches none of ours may be skipped.

    `IGNORABLE` ones, a copy of a tied head, and layers beyond the last.
    """
    if any(re.fullmatch(pattern, name) for pattern in IGNORABLE):
        return True
    if name == "lm_head.weight":
        return weights.config.tied
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= weights.config.num_layers


def _layer(weights: Weights, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    config = weights.config
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    sizes = [config.q_size, config.kv_size, config.kv_size]
    for name, part in zip("qkv", layer.qkv.split(sizes), strict=True):
        yield f"self_attn.{name}_proj.weight", part
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm
        yield "self_attn.k_norm.weight", layer.k_norm
    yield "self_attn.o_proj.weight", layer.o
    if not isinstance(layer, MoeLayer):
        yield from _mlp("mlp", layer.gate_up, layer.down)
        return
    yield "mlp.gate.weight", layer.router
    for expert, (gate_up, down) in enumerate(zip(layer.w_gate_up, layer.w_down, strict=True)):
        yield from _mlp(f"mlp.experts.{expert}", gate_up, down)


def _mlp(base: str, gate_up: Tensor, down: Tensor) -> Iterator[tuple[str, Tensor]]:
    gate, up = gate_up.chunk(2)
    yield f"{base}.gate_proj.weight", gate
    yield f"{base}.up_proj.weight", up
    yield f"{base}.down_proj.weight", down
