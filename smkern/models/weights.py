"""A decoder's weights as the operators read them: fused q/k/v, gate over up, stacked experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.errors import ConfigError, DeviceError, WeightsError
from smkern.limits import as_int, as_path
from smkern.models.config import ModelConfig
from smkern.models.layers import Layer, empty_layer
from smkern.models.loader import filled, load
from smkern.models.names import named_weights


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights of a decoder, on one device and in one dtype.

    Attributes:
        config: The model; its dtype is the weights'.
        embed: [vocab_size, hidden_size].
        layers: The weights of each layer.
        final_norm: [hidden_size].
        lm_head: [vocab_size, hidden_size]; `embed` itself where the model ties them.
    """

    config: ModelConfig
    embed: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Tensor

    @classmethod
    def empty(cls, config: ModelConfig, device: torch.device | str = "cpu") -> Weights:
        """Uninitialised weights."""
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"config is a {type(config).__name__}: pass a ModelConfig")
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

    @classmethod
    def random(
        cls, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu"
    ) -> Weights:
        """Random weights, drawn on the device: norms of ones, the rest normal.

        The standard deviation is `config.initializer_range`, as transformers initializes. The same
        seed gives the same weights on the same kind of device.

        Args:
            config: The model.
            seed: Seed of the generator.
            device: Device to draw them on.

        Raises:
            ConfigError: no `ModelConfig`.
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
        made = cls.empty(config, device)
        generator = torch.Generator(made.embed.device).manual_seed(seed)
        for tensor in made.tensors():
            if tensor.dim() == 1:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0.0, config.initializer_range, generator=generator)
        return made

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        config: ModelConfig | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
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
            progress: Draw a progress bar.

        Raises:
            ConfigError: config.json is missing or is not served.
            WeightsError: files or tensors that are missing, extra, mis-shaped, of another dtype,
                truncated or corrupt, by name.
        """
        return load(
            as_path("path", path),
            cls.empty,
            config=config,
            device=device,
            dtype=dtype,
            progress=progress,
        )

    @classmethod
    def from_tensors(
        cls,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
    ) -> Weights:
        """Weights from named tensors, for instance a transformers model's `state_dict()`.

        Args:
            config: The model; tensors are converted to its dtype.
            tensors: Tensors by their Hugging Face names.
            device: Device of the weights.

        Raises:
            WeightsError: tensors that are missing, extra or mis-shaped, by name.
        """
        if not isinstance(tensors, Mapping):
            raise WeightsError(f"tensors are a {type(tensors).__name__}: pass a mapping by name")
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"config is a {type(config).__name__}: pass a ModelConfig")
        return filled(
            lambda place: cls.empty(config, place), config.num_layers, device, tensors,
            lambda name: tensors[name], "the mapping", convert=True,
        )  # fmt: skip

    def named(self) -> dict[str, Tensor]:
        """Views of the weights by their Hugging Face names."""
        return named_weights(self)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        yield self.embed
        for layer in self.layers:
            for name in type(layer).__dataclass_fields__:
                value = getattr(layer, name)
                if value is not None:
                    yield value
        yield self.final_norm
        if self.lm_head is not self.embed:
            yield self.lm_head
