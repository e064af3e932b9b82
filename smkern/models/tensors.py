"""The tensors of a whole decoder, without where they come from: files, seeds, mappings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.models.config import ModelConfig
from smkern.models.layers import Layer, empty_layer, layer_fields


@dataclass(frozen=True, slots=True, eq=False)
class WeightTensors:
    """What `smkern.models.Weights` holds; its attributes are explained there."""

    config: ModelConfig
    embed: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Tensor

    @classmethod
    def empty(cls, config: ModelConfig, device: torch.device | str = "cpu") -> Self:
        """Weights that hold nothing yet."""
        place = torch_device(device)

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=config.dtype, device=place)

        embed = make(config.vocab_size, config.hidden_size)
        return cls(
            config=config,
            embed=embed,
            layers=tuple(empty_layer(config, make) for _ in range(config.num_layers)),
            final_norm=make(config.hidden_size),
            lm_head=embed if config.tied else make(config.vocab_size, config.hidden_size),
        )

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        yield self.embed
        for layer in self.layers:
            for name in layer_fields(layer):
                value = getattr(layer, name)
                if value is not None:
                    yield value
        yield self.final_norm
        if self.lm_head is not self.embed:
            yield self.lm_head

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())
