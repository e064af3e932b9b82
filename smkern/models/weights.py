"""A decoder's weights as the operators read them: fused q/k/v, gate over up, stacked experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.errors import ConfigError, DeviceError, WeightsError
from smkern.limits import as_int, as_path
from smkern.models.config import ModelConfig
from smkern.models.layers import Layer, empty_layer, layer_tensors
from smkern.models.loader import filled, load
from smkern.models.names import named_weights
from smkern.models.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights of a decoder, on one device and in one dtype.

    Attributes:
        config: The model, or a rank's part of it; its dtype is the weights'.
        embed: [vocab_size, hidden_size]; of a part, its rows.
        layers: The weights of each layer.
        final_norm: [hidden_size].
        lm_head: As `embed`; `embed` itself where the model ties them.
        shard: Which part of the model.
    """

    config: ModelConfig
    embed: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Tensor
    shard: Shard = WHOLE

    @classmethod
    def empty(
        cls, config: ModelConfig, device: torch.device | str = "cpu", shard: Shard = WHOLE
    ) -> Weights:
        """Uninitialised weights, of a part of the model.

        Raises:
            ConfigError: no `ModelConfig`, or sizes that so many ranks cannot share.
        """
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"config is a {type(config).__name__}: pass a ModelConfig")
        place = torch_device(device)

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=config.dtype, device=place)

        config, rows = shard.config(config), len(shard.rows(config.vocab_size))
        embed = make(rows, config.hidden_size)
        return cls(
            config=config,
            embed=embed,
            layers=tuple(empty_layer(config, make) for _ in range(config.num_layers)),
            final_norm=make(config.hidden_size),
            lm_head=embed if config.tied else make(rows, config.hidden_size),
            shard=shard,
        )

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
    ) -> Weights:
        """Random weights, drawn on the device: norms of ones, the rest normal.

        The standard deviation is `config.initializer_range`, as transformers initializes. The same
        seed gives the same weights on the same kind of device.

        Args:
            config: The model.
            seed: Seed of the generator.
            device: Device to draw them on.
            shard: Which part to keep: all parts of a seed are of one model.

        Raises:
            ConfigError: no `ModelConfig`, or sizes that so many ranks cannot share.
            ArgumentError: a seed that is no whole number of 64 bits.
            DeviceError: no such device, or one that draws nothing.

        Example:
            >>> from smkern.models import Weights, preset
            >>> small = preset("qwen3-8b").replace(
            ...     num_layers=1, hidden_size=64, num_q_heads=2, num_kv_heads=1,
            ...     intermediate_size=96, vocab_size=32)
            >>> Weights.random(small).layers[0].qkv.shape
            torch.Size([512, 64])
        """
        seed = as_int("seed", seed, -(2**63), 2**63 - 1)
        if torch_device(device).type == "meta":
            raise DeviceError("device='meta' draws no numbers: give cpu, or a GPU")
        made = cls.empty(config, device, shard)
        generator = torch.Generator(made.embed.device).manual_seed(seed)

        def draw(tensor: Tensor) -> None:
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, config.initializer_range, generator=generator)

        if shard.size == 1:
            for tensor in made.tensors():
                draw(tensor)
        else:
            _draw_part(made, config, draw)
        return made

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        config: ModelConfig | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        shard: Shard = WHOLE,
        progress: bool = False,
    ) -> Weights:
        """Weights from a folder of safetensors files, memory-mapped, fused as they are copied.

        Args:
            path: A folder with config.json and model.safetensors, or with shards and their
                model.safetensors.index.json.
            config: Instead of the folder's config.json; it may have fewer layers than the files.
            device: Device of the weights.
            dtype: Convert floating tensors to it. None: every tensor must have the configuration's
                dtype.
            shard: Which part to read; of the others nothing is copied.
            progress: Draw a progress bar.

        Raises:
            ConfigError: config.json is missing or is not served, or sizes that so many ranks
                cannot share.
            WeightsError: files or tensors that are missing, extra, mis-shaped, of another dtype,
                truncated or corrupt, by name.
        """
        return load(
            as_path("path", path),
            cls.empty,
            config=config,
            device=device,
            dtype=dtype,
            shard=shard,
            progress=progress,
        )

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
    ) -> Weights:
        """Weights from named tensors, for instance a transformers model's `state_dict()`.

        Args:
            config: The model; tensors are converted to its dtype.
            tensors: Tensors by their Hugging Face names.
            device: Device of the weights.
            shard: Which part to keep.

        Raises:
            WeightsError: tensors that are missing, extra or mis-shaped, by name.
        """
        if not isinstance(tensors, Mapping):
            raise WeightsError(f"tensors are a {type(tensors).__name__}: pass a mapping by name")
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"config is a {type(config).__name__}: pass a ModelConfig")
        return filled(
            cls.empty, config, device, tensors, lambda name: tensors[name], "the mapping",
            convert=True, shard=shard,
        )  # fmt: skip

    def named(self) -> dict[str, Tensor]:
        """Views of the weights by their Hugging Face names."""
        return named_weights(self)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        yield self.embed
        for layer in self.layers:
            yield from layer_tensors(layer)
        yield self.final_norm
        if self.lm_head is not self.embed:
            yield self.lm_head


def _draw_part(made: Weights, config: ModelConfig, draw: Callable[[Tensor], None]) -> None:
    """Draw every tensor of the whole model in its order, and keep a part; a layer at a time."""
    whole = Weights.empty(config.replace(num_layers=1), made.embed.device)
    drawn = whole.named()

    def keep(part: Weights, prefix: str) -> None:
        for name, place in part.named().items():
            if name.startswith(prefix):
                place.copy_(made.shard.cut(name, drawn[name], config.num_kv_heads))

    draw(whole.embed)
    for layer in made.layers:
        for tensor in layer_tensors(whole.layers[0]):
            draw(tensor)
        keep(replace(made, layers=(layer,)), "model.layers.")
    draw(whole.final_norm)
    if not config.tied:
        draw(whole.lm_head)
    keep(replace(made, layers=()), "")
