"""A decoder's weights as the operators read them: fused q/k/v, gate above up, experts stacked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smkern.models.config import ModelConfig
from smkern.models.loader import fill, load
from smkern.models.names import named_weights
from smkern.models.tensors import WeightTensors


@dataclass(frozen=True, slots=True, eq=False)
class Weights(WeightTensors):
    """All weights of a decoder, on one device and in one dtype.

    Attributes:
        config: What they are the weights of; its dtype is theirs.
        embed: [vocab_size, hidden_size].
        layers: One a layer.
        final_norm: [hidden_size].
        lm_head: [vocab_size, hidden_size]; `embed` itself where the model ties them.
    """

    @classmethod
    def random(
        cls, config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu"
    ) -> Weights:
        """Random weights, drawn on the device: norms of ones, the rest normal.

        The standard deviation is `config.initializer_range`, as transformers initializes. The same
        seed gives the same weights on the same kind of device.

        Args:
            config: The model.
            seed: Of the generator.
            device: Where they are drawn and stay.

        Example:
            >>> from smkern.models import Weights, preset
            >>> small = preset("qwen3-8b").replace(
            ...     num_layers=1, hidden_size=64, num_q_heads=2, num_kv_heads=1,
            ...     intermediate_size=96, vocab_size=32)
            >>> Weights.random(small).layers[0].qkv.shape
            torch.Size([512, 64])
        """
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
            config: Instead of the folder's config.json; fewer layers than the files have are
                allowed by `replace(num_layers=...)`.
            device: Where the weights shall lie.
            dtype: Convert floating tensors to it. None: the configuration's, which every tensor
                must have.
            progress: Draw a progress bar.

        Raises:
            ConfigError: config.json is missing or is not served.
            WeightsError: files or tensors that are missing, extra, mis-shaped, of another dtype,
                truncated or corrupt, by name.
        """
        return load(
            Path(path), cls.empty, config=config, device=device, dtype=dtype, progress=progress
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
            tensors: By Hugging Face's names.
            device: Where the weights shall lie.

        Raises:
            WeightsError: tensors that are missing, extra or mis-shaped, by name.
        """
        made = cls.empty(config, device)
        fill(made, tensors, lambda name: tensors[name], "the mapping", convert=True)
        return made

    def named(self) -> dict[str, Tensor]:
        """Views of the weights by the names that Hugging Face's checkpoints have for them."""
        return named_weights(self)
