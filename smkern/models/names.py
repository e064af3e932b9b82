"""Hugging Face's names of a decoder's tensors, as views of the fused weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from smkern.models.architecture import WRAPPED, Family
from smkern.models.layers import Layer, MoeLayer, Scales

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

IGNORABLE = (r".*\.rotary_emb\.inv_freq", r".*\.(q|prob)_scale", r".*\.masked_bias")
"""Names in checkpoints that are not read: values that config.json implies, scales of fp8 attention.
"""
BESIDE_TEXT = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
"""What a wrapper of a text model has beside it."""
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
KV_SCALES = ("self_attn.k_scale", "self_attn.v_scale")
"""What an fp8 cache's values are multiplied by; two a layer."""

SCALE, INVERSE, INPUT_SCALE = ".weight_scale", ".weight_scale_inv", ".input_scale"
"""What follows a linear layer's name in the names of its scales; the inverse of DeepSeek's name is
that of the scale at quantizing, so both are what values are multiplied by."""
_OTHER_NAMES = {
    SCALE: INVERSE, INVERSE: SCALE, ".activation_scale": INPUT_SCALE,
    ".k_proj.output_scale": ".k_scale", ".v_proj.output_scale": ".v_scale",
}  # fmt: skip


def name_of_scale(name: str) -> str:
    """The name by which `Weights.named` may have a scale that a checkpoint calls otherwise."""
    for ending, other in _OTHER_NAMES.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + other
    return name


def text_names(family: Family, names: Collection[str]) -> dict[str, str]:
    """The names of a checkpoint by what the text model alone would call its tensors; those of what
    is wrapped beside it are left out."""
    if family.text_type is None:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        plain = name.removeprefix("language_model.") if name.endswith(HEAD) else name
        for prefix in WRAPPED:
            if name.startswith(f"{prefix}."):
                plain = f"model{name.removeprefix(prefix)}"
        if not BESIDE_TEXT.match(name):
            found[name if plain in found or plain in names else plain] = name
    return found


def has_kv_scales(names: Iterable[str]) -> bool:
    """Whether a checkpoint with these names has scales of an fp8 cache."""
    return any(name_of_scale(name).endswith(KV_SCALES) for name in names)


def fused_names(
    family: Family, layers: Iterable[Layer]
) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Tensors that replace one or several of `Weights.named`, as transformers 5 has bf16 experts.

    Returns:
        By name: our tensor, and the names that it replaces.
    """
    found: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, MoeLayer) and layer.scales.down is None:
            base, ours = (f"model.layers.{index}.{mlp}" for mlp in ("mlp", family.mlp))
            experts = [f"{ours}.experts.{e}" for e in range(layer.router.shape[0])]
            parts = tuple(f"{e}.{half}.weight" for e in experts for half in family.gate_up)
            downs = tuple(f"{e}.{family.down}.weight" for e in experts)
            found[f"{base}.experts.gate_up_proj"] = (layer.w_gate_up, parts)
            found[f"{base}.experts.down_proj"] = (layer.w_down, downs)
            found[f"{base}.gate.weight"] = (layer.router, (f"{ours}.gate.weight",))
    return found


def is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether a tensor that matches none of ours may be skipped.

    `IGNORABLE` ones, a copy of a tied head, and layers beyond the last.
    """
    if any(re.fullmatch(pattern, name) for pattern in IGNORABLE):
        return True
    if name == HEAD:
        return config.tied
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= config.num_layers


def named_layer(config: ModelConfig, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    """What follows a layer's number in the names of its weights, and views of these."""
    family, scales = config.family, layer.scales
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    sizes = [config.q_size, config.kv_size, config.kv_size]
    names = [f"self_attn.{name}" for name in family.qkv]
    yield from _stacked(names, layer.qkv, sizes, scales.qkv)
    if layer.qkv_bias is not None:
        for name, part in zip(names, layer.qkv_bias.split(sizes), strict=True):
            yield f"{name}.bias", part
    if layer.q_norm is not None and layer.k_norm is not None:
        yield "self_attn.q_norm.weight", layer.q_norm
        yield "self_attn.k_norm.weight", layer.k_norm
    yield from _linear("self_attn.o_proj", layer.o, scales.o)
    gate_up, down = scales.gate_up, scales.down
    if not isinstance(layer, MoeLayer):
        yield from _mlp(family.mlp, family, layer.gate_up, layer.down, gate_up, down)
        return
    yield f"{family.mlp}.gate.weight", layer.router
    for expert, weight in enumerate(zip(layer.w_gate_up, layer.w_down, strict=True)):
        of_one = [x if x is None else Scales(x.weight[expert], x.input) for x in (gate_up, down)]
        yield from _mlp(f"{family.mlp}.experts.{expert}", family, *weight, *of_one)


def _mlp(
    base: str, family: Family, gate_up: Tensor, down: Tensor, wide: Scales | None,
    narrow: Scales | None,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    names = [f"{base}.{name}" for name in family.gate_up]
    yield from _stacked(names, gate_up, [down.shape[1]] * 2, wide)
    yield from _linear(f"{base}.{family.down}", down, narrow)


def _stacked(
    names: Sequence[str], weight: Tensor, sizes: Sequence[int], scales: Scales | None
) -> Iterator[tuple[str, Tensor]]:
    """Projections whose rows, so many each, lie one behind the other; one where a checkpoint has
    them so, too."""
    if len(names) == 1:
        yield from _linear(names[0], weight, scales)
        return
    parts = weight.split(list(sizes))
    if scales is None:
        for name, part in zip(names, parts, strict=True):
            yield f"{name}.weight", part
        return
    rows = weight.shape[0] // scales.weight.shape[0]
    shares = scales.weight.split([size // rows for size in sizes])
    for name, part, share in zip(names, parts, shares, strict=True):
        yield from _linear(name, part, Scales(share, scales.input))


def _linear(name: str, weight: Tensor, scales: Scales | None) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", weight
    if scales is not None:
        suffix = SCALE if scales.weight.shape[0] == weight.shape[0] else INVERSE
        yield f"{name}{suffix}", scales.weight
        if scales.input is not None:
            yield f"{name}{INPUT_SCALE}", scales.input
