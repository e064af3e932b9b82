"""What an `LLM` is made of: weights, the sizes of its pool, a tokenizer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from smkern.errors import ArgumentError, ConfigError
from smkern.kv import KvSizes
from smkern.limits import shown
from smkern.models.config import ModelConfig
from smkern.models.quantization import Kind
from smkern.models.shard import Shard
from smkern.models.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from smkern.models.weights import Weights, quantize


def find_weights(
    config: ModelConfig,
    folder: Path | None,
    device: torch.device,
    dtype: torch.dtype | None,
    kind: Kind | None,
    seed: int,
    shard: Shard,
    progress: bool = False,
) -> Weights:
    """Random weights or the folder's, converted and quantized where that is asked for.

    Raises:
        ConfigError: a checkpoint of another quantization, or fp32 on a GPU.
    """
    given, on_gpu = config.quantization, device.type == "cuda"
    if dtype is None and kind is not None and given is None:
        # What is not quantized is converted as well: norms may be fp32, and so may all.
        dtype = torch.bfloat16 if on_gpu and config.dtype is torch.float32 else config.dtype
    if dtype is not None:
        config = config.replace(dtype=dtype)
    if on_gpu and config.dtype is torch.float32:  # said before all of it is copied
        raise ConfigError(
            f"dtype={config.dtype} on {device}: GPU operators take torch.bfloat16 and "
            "torch.float16; pass dtype=torch.bfloat16 (smkern serve: --dtype bfloat16)"
        )
    if folder is None:
        return Weights.random(config, seed, device, shard, dtype=kind)
    if kind is not None and given is not None and given.kind != kind:
        raise ConfigError(
            f"dtype={kind!r} of a checkpoint that is {given.kind!r}: leave dtype out, or take the "
            "checkpoint that it was made of"
        )
    loaded = Weights.load(
        folder, config=config, device=device, dtype=dtype, shard=shard, progress=progress
    )
    return loaded if kind is None or given is not None else quantize(loaded, kind)


def check_kind(weights: Weights, kind: Kind) -> None:
    """Raise ConfigError for weights that a caller brought and that are not stored in this kind."""
    given = weights.config.quantization
    if given is None:
        raise ConfigError(
            f"dtype={kind!r} with weights that are not quantized: pass "
            f"smkern.models.quantize(weights, {kind!r}), or leave dtype out"
        )
    if given.kind != kind:
        raise ConfigError(
            f"dtype={kind!r} with weights that are {given.kind!r}: leave dtype out, or quantize "
            "those that they were made of"
        )


def kv_sizes(config: ModelConfig, page_size: int, dtype: torch.dtype | None) -> KvSizes:
    """Sizes of a model's pool.

    Raises:
        ArgumentError: a dtype that attention does not serve beside the model's.
    """
    if dtype not in (None, config.dtype, torch.float8_e4m3fn):
        raise ArgumentError(
            f"kv_dtype={shown(dtype)} of a model in {config.dtype}: pass {config.dtype}, "
            f"{torch.float8_e4m3fn} or None"
        )
    heads, dim = config.num_kv_heads, config.head_dim
    return KvSizes(config.num_layers, heads, dim, page_size, dtype or config.dtype)


def find_tokenizer(
    folder: Path | None, given: str | Path | Tokenizer | None
) -> tuple[Tokenizer | None, Path | None]:
    """The tokenizer; and the folder of one that cannot be read, though token ids come out."""
    if given is None and folder is not None and has_tokenizer(folder):
        if find_spec("transformers") is None:
            return None, folder
        given = folder
    return load_tokenizer(Path(given)) if isinstance(given, (str, Path)) else given, None
