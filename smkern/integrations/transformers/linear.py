"""Linear layers whose product is `smkern.gemm`, on at most the SMs of the current partition."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from smkern.errors import ArgumentError
from smkern.ops.gemm import gemm


class Linear(nn.Linear):
    """`torch.nn.Linear` by `smkern.gemm`: y = x @ weight.T + bias, one launch. No backward.

    Example:
        >>> layer = Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False)
        >>> layer(torch.ones(2, 3, 64, dtype=torch.bfloat16)).shape
        torch.Size([2, 3, 32])
    """

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the weight's dtype.

        Raises:
            ArgumentError: a gradient is wanted; what `smkern.gemm` cannot take.
        """
        if torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad):
            raise ArgumentError(
                f"a gradient through {self} is wanted, smkern.gemm has no backward: call the model "
                "under torch.no_grad(), or leave this layer out of swap_linear"
            )
        if input.shape[-1:] != (self.in_features,):
            raise ArgumentError(
                f"input has shape {list(input.shape)}, {self} takes rows of {self.in_features}"
            )
        rows = input.reshape(-1, self.in_features)
        return gemm(rows, self.weight, bias=self.bias).view(*input.shape[:-1], self.out_features)


def swap_linear(
    model: nn.Module, *, only: Callable[[str, nn.Linear], bool] = lambda name, layer: True
) -> tuple[str, ...]:
    """Make a model's linear layers run `smkern.gemm`, in place; parameters stay where they are.

    Layers of other classes than `torch.nn.Linear` (quantised, sharded, adapted) are left alone, as
    are those of a dtype that the GEMM does not have, and those whose `forward` was replaced, as
    accelerate does where a model lies on several devices: swap before that.

    Args:
        model: Any module.
        only: Called with a layer's name and the layer: whether to swap it.

    Returns:
        The names of the layers that were swapped.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16()
        >>> swap_linear(model, only=lambda name, layer: layer.out_features >= 16)
        ('0',)
    """
    served = (torch.bfloat16, torch.float16)
    chosen = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear
        and "forward" not in vars(layer)  # which would go on to run torch's
        and layer.weight.dtype in served
        and only(name, layer)
    }
    for layer in chosen.values():
        layer.__class__ = Linear
    return tuple(chosen)
