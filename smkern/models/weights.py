"""A decoder's weights as the operators read them: fused q/k/v, gate over up, stacked experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.errors import ConfigError, DeviceError, WeightsError
from smkern.limits import as_int, as_path
from smkern.models.config import ModelConfig
from smkern.models.layer_quantizing import check_device, quantize_layer
from smkern.models.layers import Layer, Make, empty_layer
from smkern.models.loader import filled, load
from smkern.models.names import EMBED, HEAD, KV_SCALES, named_layer
from smkern.models.quantization import Kind, Quantization
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
        kv_scales: [num_layers, 2] fp32: what keys and values of a layer's fp8 cache are multiplied
            by. None: 1; other caches have none.
    """

    config: ModelConfig
    embed: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    lm_head: Tensor
    shard: Shard = WHOLE
    kv_scales: Tensor | None = None

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
        *,
        kv_scales: bool = False,
    ) -> Weights:
        """Uninitialised weights, of a part of the model.

        Args:
            config: The whole model.
            device: Where they shall lie.
            shard: Which part.
            kv_scales: Make those of an fp8 cache, too.

        Raises:
            ConfigError: no `ModelConfig`, or sizes that so many ranks cannot share.
        """
        config = shard.config(with_dtype(config, None))
        make = _maker(config, device)
        table = (len(shard.rows(config.vocab_size)), config.hidden_size)
        embed = make(*table, dtype=config.dtype)
        return cls(
            config=config,
            embed=embed,
            layers=tuple(empty_layer(config, make) for _ in range(config.num_layers)),
            final_norm=make(config.hidden_size, dtype=config.dtype),
            lm_head=embed if config.tied else make(*table, dtype=config.dtype),
            shard=shard,
            kv_scales=make(config.num_layers, 2, dtype=torch.float32) if kv_scales else None,
        )

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        shard: Shard = WHOLE,
        *,
        dtype: torch.dtype | Kind | None = None,
    ) -> Weights:
        """Random weights, drawn on the device: norms of ones, the rest normal.

        The standard deviation is `config.initializer_range`, as transformers initializes. The same
        seed gives the same weights on the same kind of device; in fp8 it gives what `quantize`
        makes of those.

        Args:
            config: The model.
            seed: Seed of the generator.
            device: Device to draw them on.
            shard: Which part to keep: all parts of a seed are of one model.
            dtype: Instead of the configuration's: a torch.dtype, or "fp8-block", "fp8-channel" or
                "fp8-tensor" for quantized linear layers. The weights' `config` says so.

        Raises:
            ConfigError: no `ModelConfig`, a dtype that is not served, or sizes that so many ranks
                cannot share.
            ArgumentError: a seed that is no whole number of 64 bits.
            DeviceError: no such device, one that draws nothing, or a GPU without e4m3.

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
        config = with_dtype(config, dtype)
        plain, part = config.replace(quantization=None), shard.config(config)
        make, table = _maker(config, device), (config.vocab_size, config.hidden_size)
        embed = make(*table, dtype=config.dtype)
        generator = torch.Generator(embed.device).manual_seed(seed)

        def drawn(tensor: Tensor) -> Tensor:
            if tensor.dim() == 1:
                return tensor.fill_(1.0)
            return tensor.normal_(0.0, config.initializer_range, generator=generator)

        def own(name: str, tensor: Tensor) -> Tensor:
            """This part of a drawn tensor, in memory of its own."""
            found = shard.cut(name, tensor, config)
            return tensor if shard.size == 1 else found.clone()

        def layer(index: int) -> Layer:
            made = empty_layer(plain, make)
            for tensor in made.tensors():
                drawn(tensor)
            if made.qkv_bias is not None:
                made.qkv_bias.normal_(0.0, config.initializer_range, generator=generator)
            if config.quantization is not None:
                made = quantize_layer(made, config, index)
            if shard.size == 1:
                return made
            kept = empty_layer(part, make)
            whole = dict(named_layer(config, made))
            for name, place in named_layer(part, kept):
                place.copy_(shard.cut(name, whole[name], config))
            return kept

        embed = own(EMBED, drawn(embed))
        layers = tuple(layer(index) for index in range(config.num_layers))
        final_norm = drawn(make(config.hidden_size, dtype=config.dtype))
        head = embed
        if not config.tied:
            head = own(HEAD, drawn(make(*table, dtype=config.dtype)))
        return cls(part, embed, layers, final_norm, head, shard)

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
                truncated, corrupt or beyond the range of fp16 where that is asked for, by name.
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
            WeightsError: tensors that are missing, extra, mis-shaped or beyond the range of fp16
                where that is the dtype, by name.
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
        found = {EMBED: self.embed, "model.norm.weight": self.final_norm}
        if self.lm_head is not self.embed:
            found[HEAD] = self.lm_head
        for index, layer in enumerate(self.layers):
            for name, tensor in named_layer(self.config, layer):
                found[f"model.layers.{index}.{name}"] = tensor
            if self.kv_scales is not None:
                for at, name in enumerate(KV_SCALES):
                    found[f"model.layers.{index}.{name}"] = self.kv_scales[index, at : at + 1]
        return found

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        yield self.embed
        for layer in self.layers:
            yield from layer.tensors()
        yield self.final_norm
        if self.lm_head is not self.embed:
            yield self.lm_head
        if self.kv_scales is not None:
            yield self.kv_scales

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in self.tensors())


def with_dtype(config: ModelConfig, dtype: torch.dtype | Kind | None) -> ModelConfig:
    """A configuration in another dtype, or with its linear layers in fp8.

    Raises:
        ConfigError: no `ModelConfig`, or a dtype or kind that is not served.
    """
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"config is a {type(config).__name__}: pass a ModelConfig")
    if dtype is None:
        return config
    if isinstance(dtype, torch.dtype):
        return config.replace(dtype=dtype)
    return config.replace(quantization=Quantization(dtype))


def quantize(weights: Weights, kind: Kind) -> Weights:
    """Weights whose linear layers are e4m3 with scales, made of weights that are not.

    A group of weights that shares a scale is divided by its largest magnitude over 448 and rounded
    to nearest. Embedding, head, norms and routers are the same tensors as before.

    Args:
        weights: Not quantized; unchanged.
        kind: "fp8-block", "fp8-channel" or "fp8-tensor", as `Quantization` says; the inputs' scales
            are dynamic.

    Raises:
        ConfigError: another kind, weights that are quantized, or sizes that blocks do not divide.
        WeightsError: weights that are not finite.
        DeviceError: weights on a GPU without e4m3.

    Source: blocks as in DeepSeek-V3 (arXiv 2412.19437) section 3.3.2.

    Example:
        >>> from smkern.models import Weights, preset, quantize
        >>> small = preset("qwen3-8b").replace(
        ...     num_layers=1, hidden_size=128, num_q_heads=2, num_kv_heads=1,
        ...     intermediate_size=256, vocab_size=32)
        >>> made = quantize(Weights.random(small), "fp8-block")
        >>> made.layers[0].qkv.dtype, made.layers[0].scales.qkv.weight.shape
        (torch.float8_e4m3fn, torch.Size([4, 1]))
    """
    if not isinstance(weights, Weights):
        raise ConfigError(f"weights are a {type(weights).__name__}: pass Weights")
    if weights.config.quantization is not None:
        raise ConfigError(
            f"the weights are quantized ({weights.config.quantization.kind}): pass those that they "
            "were made of"
        )
    config = weights.config.replace(quantization=Quantization(kind))
    check_device(config, weights.embed.device)
    layers = tuple(quantize_layer(layer, config, i) for i, layer in enumerate(weights.layers))
    return replace(weights, config=config, layers=layers)


def _maker(config: ModelConfig, device: torch.device | str) -> Make:
    place = torch_device(device)
    check_device(config, place)

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=place)

    return make
