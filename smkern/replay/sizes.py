"""What serves a trace: a model's name, its splits, and how much it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smkern.errors import ArgumentError
from smkern.profile import DEFAULT, load_profile

if TYPE_CHECKING:
    from smkern.device import DeviceInfo
    from smkern.models.config import ModelConfig

RUNGS = (8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 72, 80, 96, 112)
"""SMs of the decode side: close together where decode steps still gain by more of them."""
MAX_CONTEXT = 40_960
"""Tokens of a request that is replayed, at most: Qwen3's context, and part of a longer one."""
KV_TOKENS = 700_000
USED = 0.826
"""Share of the device's memory that weights and pages take; the rest is activations and graphs."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an executor in a replay holds.

    Attributes:
        kv_tokens: Tokens of the KV pool.
        rungs: SMs of the decode side of each split.
        max_running: Requests that decode at a time.
        max_prefill: Requests of a batch of prompts.
        max_tokens: New tokens of one.
        max_context: Tokens of a request, prompt and output.
        page_size: Tokens of a page.
        num_sms: SMs of the simulated device.
    """

    kv_tokens: int = KV_TOKENS
    rungs: tuple[int, ...] = RUNGS
    max_running: int = 256
    max_prefill: int = 64
    max_tokens: int = 8192
    max_context: int = MAX_CONTEXT
    page_size: int = 64
    num_sms: int = 132

    @property
    def num_pages(self) -> int:
        return self.kv_tokens // self.page_size


def kv_tokens_beside(config: ModelConfig, info: DeviceInfo) -> int:
    """Tokens of KV that a GPU holds beside a model's weights, 700,000 at most.

    Raises:
        ArgumentError: the weights leave no room.
    """
    left = USED * info.memory_bytes - config.weight_bytes
    tokens = int(left / config.kv_bytes_per_token) // 10_000 * 10_000
    if tokens <= 0:
        raise ArgumentError(
            f"the weights take {config.weight_bytes / 1e9:.0f} GB: an {info.name} has "
            f"{info.memory_bytes / 1e9:.0f}, and no room for KV is left; replay a smaller model"
        )
    return min(KV_TOKENS, tokens)


def sizes_for(config: ModelConfig, info: DeviceInfo | None = None) -> Sizes:
    """The default of a model: 256 rows, 40,960 tokens of its context at most, as much KV as the GPU
    holds. For more make a `SimServer` with `sizes=replace(sizes_for(config), max_context=...)`.

    Args:
        config: The model.
        info: The GPU; None: an H200.

    Raises:
        ArgumentError: the weights leave no room.
    """
    info = info or load_profile(DEFAULT).info
    rungs = tuple(rung for rung in RUNGS if rung < info.num_sms)
    most = min(config.max_position, MAX_CONTEXT)
    return Sizes(kv_tokens_beside(config, info), rungs, max_context=most, num_sms=info.num_sms)
