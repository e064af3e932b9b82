"""Scales of fp8 checkpoints: what they may look like, and copying them into fused tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from smkern.errors import WeightsError
from smkern.models.architecture import dtypes
from smkern.models.names import INPUT_SCALE, INVERSE, KV_SCALES, SCALE
from smkern.models.quantization import Quantization


def is_scale(name: str) -> bool:
    """Whether a tensor of `Weights.named` holds scales."""
    return name.endswith((SCALE, INVERSE, INPUT_SCALE, *KV_SCALES))


def check_scale(
    name: str, tensor: Tensor, place: Tensor, source: str, kind: Quantization | None
) -> None:
    """Raise WeightsError unless a tensor holds the scales that belong into a place.

    The scale of a whole projection may come alone, and scales of rows as a vector. Values are
    looked at unless the tensor is on `meta`.
    """
    if tensor.dtype not in dtypes():
        raise WeightsError(
            f"{name} in {source} is {tensor.dtype}, scales are served in "
            f"{[str(x) for x in dtypes()]}: convert it"
        )
    shapes = [list(place.shape)]
    if place.dim() == 2 and place.shape[1] == 1:
        shapes.append([place.shape[0]])
    if place.dim() == 1 or (kind is not None and kind.kind == "fp8-tensor"):
        shapes += [[], [1], [1, 1]]
    if list(tensor.shape) not in shapes:
        whose = "scales" if kind is None else f"{kind.kind} scales"
        raise WeightsError(
            f"{name} in {source} has shape {list(tensor.shape)}, {whose} of this tensor have "
            f"{shapes[0]}: use the config.json that belongs to it"
        )
    if tensor.device.type == "meta":
        return
    values = tensor.float()
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise WeightsError(
            f"{name} in {source} holds a scale that is not finite or not above 0: download the "
            "checkpoint again"
        )


def put_scale(name: str, tensor: Tensor, place: Tensor) -> None:
    """Copy scales; of inputs that several projections share the largest counts."""
    values = tensor.to(place.device, torch.float32)
    values = values.reshape(1) if values.numel() == 1 else values.reshape(place.shape)
    if name.endswith(INPUT_SCALE):
        torch.maximum(place, values, out=place)
    else:
        place.copy_(values)
