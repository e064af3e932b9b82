"""A decoder's weights as the operators read them: fused q/k/v, gate above up, experts stacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smkern.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """What every layer has.

    Attributes:
        input_norm: [hidden_size].
        qkv: [(q_heads + 2 kv_heads) * head_dim, hidden_size]: queries, keys, values.
        q_norm: [head_dim], or None.
        k_norm: Likewise.
        o: [hidden_size, q_heads * head_dim].
        post_norm: [hidden_size], in front of the MLP.
    """

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer(AttentionWeights):
    """A layer with one MLP.

    Attributes:
        gate_up: [2 * intermediate_size, hidden_size]: gate rows, then up rows.
        down: [hidden_size, intermediate_size].
    """

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MoeLayer(AttentionWeights):
    """A layer with a mixture of experts, each of its own width I.

    Attributes:
        router: [num_experts, hidden_size].
        w_gate_up: [num_experts, 2 I, hidden_size]: gate rows, then up rows.
        w_down: [num_experts, hidden_size, I].
    """

    router: Tensor
    w_gate_up: Tensor
    w_down: Tensor


Layer = DenseLayer | MoeLayer


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """All weights of a decoder, on one device and in one dtype.

    Attributes:
        config: What they are the weights of; its dtype is theirs.
        embed: [vocab_size, hidden_size].
        layers: One a layer.
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
        """Weights that hold nothing yet."""
        place = torch.device(device)

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=config.dtype, device=place)

        embed = make(config.vocab_size, config.hidden_size)
        return cls(
            config=config,
            embed=embed,
            layers=tuple(_empty_layer(config, make) for _ in range(config.num_layers)),
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
        from smkern.models.loader import load

        return load(Path(path), config=config, device=device, dtype=dtype, progress=progress)

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
        from smkern.models.loader import fill

        made = cls.empty(config, device)
        fill(made, tensors, lambda name: tensors[name], "the mapping", convert=True)
        return made

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

    def named(self) -> dict[str, Tensor]:
        """Views of the weights by the names that Hugging Face's checkpoints have for them."""
        from smkern.models.names import named_weights

        return named_weights(self)


def layer_fields(layer: Layer) -> list[str]:
    """The names of a layer's tensors, in the order of a forward."""
    return list(type(layer).__dataclass_fields__)


def _empty_layer(config: ModelConfig, make: Callable[..., Tensor]) -> Layer:
    hidden, moe = config.hidden_size, config.moe
    input_norm, qkv = make(hidden), make(config.qkv_size, hidden)
    q_norm = make(config.head_dim) if config.qk_norm else None
    k_norm = make(config.head_dim) if config.qk_norm else None
    o, post_norm = make(hidden, config.q_size), make(hidden)
    if moe is None:
        width = config.intermediate_size
        gate_up, down = make(2 * width, hidden), make(hidden, width)
        return DenseLayer(input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down)
    return MoeLayer(
        input_norm, qkv, q_norm, k_norm, o, post_norm,
        make(moe.num_experts, hidden),
        make(moe.num_experts, 2 * moe.intermediate_size, hidden),
        make(moe.num_experts, hidden, moe.intermediate_size),
    )  # fmt: skip
