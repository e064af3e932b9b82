"""A layer's weights in fp8 from those in the model's dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smkern.device import device_info
from smkern.errors import WeightsError
from smkern.limits import check_fp8_capability
from smkern.models.layers import DenseLayer, Layer, LayerScales, Scales
from smkern.models.quantization import Kind
from smkern.ops import quantize as quantize_matrix

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

STATIC = 8 / 448
"""The inputs' scale of random weights: normed rows are rarely above 8."""


def check_device(config: ModelConfig, device: torch.device) -> None:
    """Raise DeviceError for a quantized model on a GPU without e4m3, before it takes memory."""
    if config.quantization is not None and device.type == "cuda":
        check_fp8_capability(device_info(device.index).sm)


def quantize_layer(layer: Layer, config: ModelConfig, index: int) -> Layer:
    """A layer of a quantized model from one in the model's dtype.

    Raises:
        WeightsError: weights that are not finite, naming layer `index`.
    """
    assert config.quantization is not None
    names = ("qkv", "o", "gate_up", "down")
    if not isinstance(layer, DenseLayer):
        names = ("qkv", "o", "w_gate_up", "w_down")
    projections = {"qkv": (config.q_size, config.kv_size, config.kv_size)}
    made: dict[str, Any] = {}
    scales = []
    for name in names:
        weight = getattr(layer, name)
        rows = weight.shape[-2]
        default = (rows // 2, rows // 2) if name.endswith("gate_up") else (rows,)
        parts = projections.get(name, default)
        made[name], scale = quantize_weight(weight, config.quantization.kind, parts)
        if not bool(scale.isfinite().all()):
            raise WeightsError(
                f"{name} of layer {index} holds values that are not finite: find out where they "
                "come from before they are quantized"
            )
        static = config.quantization.activations == "static"
        scales.append(Scales(scale, scale.new_full((1,), STATIC) if static else None))
    return replace(layer, scales=LayerScales(*scales), **made)


def quantize_weight(weight: Tensor, kind: Kind, parts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A weight [N, K], or [experts, N, K], in e4m3, and its scales as `Scales.weight` holds them.

    Args:
        weight: In the model's dtype.
        kind: How scales are shared.
        parts: Rows of each projection in it.
    """
    if weight.dim() == 3:
        experts = [quantize_weight(one, kind, parts) for one in weight]
        return torch.stack([x for x, _ in experts]), torch.stack([x for _, x in experts])
    if kind == "fp8-block":
        return quantize_matrix(weight, "weight_block")
    if kind == "fp8-channel":
        values, scales = quantize_matrix(weight, "token")
        return values, scales[:, None]
    done = [quantize_matrix(part, "tensor") for part in weight.split(list(parts))]
    rows = [scale.expand(size) for (_, scale), size in zip(done, parts, strict=True)]
    return torch.cat([values for values, _ in done]), torch.cat(rows)[:, None]
