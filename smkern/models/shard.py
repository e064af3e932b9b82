"""A rank's part of a model that several GPUs share: which heads, widths and rows are its own."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smkern.errors import ConfigError
from smkern.limits import as_int
from smkern.models.config import ModelConfig

MAX_RANKS = 64
"""GPUs that share a model, at most; one host has 8 or 16."""

_BY_ROWS = re.compile(r".*\.((q|gate|up)_proj|w1|w3)(\.|$)|model\.embed_tokens\.|lm_head\.")
_BY_KV_HEADS = re.compile(r".*\.(k|v)_proj\.")
_BY_COLUMNS = re.compile(r".*\.((o|down)_proj|w2)(\.|$)")
_BY_HALVES = re.compile(r".*\.gate_up_proj(\.|$)")
_BY_HEADS = re.compile(r".*\.qkv_proj\.")


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `size` equal parts of a model.

    Query heads, the inner width of MLPs and experts, and the vocabulary are cut into `size` parts;
    KV heads too, and where there are fewer than ranks each goes to the ranks whose query heads read
    it. Norms and routers are everybody's.

    Attributes:
        rank: Which part, from 0.
        size: How many parts.

    Raises:
        ArgumentError: a rank that is not below the size.

    Source: Megatron-LM (arXiv 1909.08053) section 3.

    Example:
        >>> from smkern.models import Shard, preset
        >>> part = Shard(rank=1, size=2).config(preset("qwen3-8b"))
        >>> part.num_q_heads, part.num_kv_heads, part.intermediate_size
        (16, 4, 6144)
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        as_int("rank", self.rank, 0, as_int("size", self.size, 1, MAX_RANKS) - 1)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The sizes of this part; the vocabulary stays whole, as tokens and logits are.

        Raises:
            ConfigError: sizes that so many ranks cannot share evenly.
        """
        size, moe = self.size, config.moe
        widths = {"num_q_heads": config.num_q_heads, "vocab_size": config.vocab_size}
        if moe is None:
            widths["intermediate_size"] = config.intermediate_size
        else:
            widths["moe intermediate_size"] = moe.intermediate_size
        uneven = [f"{name}={width}" for name, width in widths.items() if width % size]
        if size % config.num_kv_heads and config.num_kv_heads % size:
            uneven.append(f"num_kv_heads={config.num_kv_heads}")
        if uneven:
            raise ConfigError(
                f"tp={size} ranks cannot share {' and '.join(uneven)} evenly: take a number of "
                "ranks that divides them (or, of KV heads, that they divide)"
            )
        return config.replace(
            num_q_heads=config.num_q_heads // size,
            num_kv_heads=max(config.num_kv_heads // size, 1),
            intermediate_size=config.intermediate_size // size,
            moe=moe and replace(moe, intermediate_size=moe.intermediate_size // size),
        )

    def rows(self, vocab_size: int) -> range:
        """Rows of the embedding and of the head that are this part's."""
        count = vocab_size // self.size
        return range(self.rank * count, (self.rank + 1) * count)

    def cut(self, name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
        """This part of a checkpoint's tensor: a view, but for fused projections; whole where it is
        everybody's.

        Args:
            name: Its Hugging Face name.
            tensor: The whole tensor: a weight, the scales of its blocks, or a bias.
            config: The whole model.
        """
        if self.size == 1 or tensor.numel() == 1:
            return tensor
        rows = max(tensor.dim() - 2, 0)  # a bias has nothing else
        if _BY_HALVES.match(name):
            return torch.cat([self._part(half, -2) for half in tensor.chunk(2, -2)], -2)
        if _BY_HEADS.match(name):
            q, kv, all_heads = config.num_q_heads, config.num_kv_heads, config.qkv_size
            sizes = [x * config.head_dim * len(tensor) // all_heads for x in (q, kv, kv)]
            query, *others = tensor.split(sizes)
            return torch.cat([self._part(query, 0), *(self._of_kv(x, 0, kv) for x in others)])
        if _BY_KV_HEADS.match(name):
            return self._of_kv(tensor, rows, config.num_kv_heads)
        if _BY_ROWS.match(name):
            return self._part(tensor, rows)
        return self._part(tensor, -1) if _BY_COLUMNS.match(name) else tensor

    def _part(self, tensor: Tensor, dim: int) -> Tensor:
        return _part(tensor, dim, self.size, self.rank)

    def _of_kv(self, tensor: Tensor, dim: int, num_kv_heads: int) -> Tensor:
        parts = min(self.size, num_kv_heads)
        return _part(tensor, dim, parts, self.rank * parts // self.size)


def _part(tensor: Tensor, dim: int, parts: int, index: int) -> Tensor:
    """One of several equal parts; what all rows or columns have in common is everybody's."""
    width = tensor.shape[dim]
    if width == 1:
        return tensor
    if width % parts:
        raise ConfigError(
            f"a tensor of shape {list(tensor.shape)} cannot be cut into {parts} parts: take a "
            "number of ranks that divides its blocks"
        )
    return tensor.narrow(dim, index * (width // parts), width // parts)


WHOLE = Shard()
"""All of a model."""
