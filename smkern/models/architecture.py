"""The decoder architectures that are served, their dtypes, and the mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from smkern.errors import ConfigError
from smkern.limits import MAX_SIZE

if TYPE_CHECKING:
    import torch

Architecture = Literal[
    "llama", "mistral", "mistral3", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "seed_oss"
]
ARCHITECTURES: Mapping[str, Architecture] = {
    "InternLM3ForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Mistral3ForConditionalGeneration": "mistral3",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SeedOssForCausalLM": "seed_oss",
}
"""Our name of each Hugging Face model class."""


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture has, and what transformers assumes where a config.json says nothing.

    Attributes:
        qk_norm: Queries and keys are normed by head.
        qkv_bias: Queries, keys and values have a bias.
        has_experts: Layers are mixtures of experts.
        kv_heads: KV heads of a file that does not say it; None: as many as query heads.
        window: Sliding window of such a file.
        window_switch: Whether use_sliding_window turns it off.
        head_dim_follows: Whether such a file's head_dim is hidden_size by query heads.
        scales_rope: Whether RoPE may be scaled; of others the same words mean something else.
        qkv: What checkpoints call the parts of the input projection, one where they are fused.
        mlp: What they call an MLP, or a mixture of experts.
        gate_up: Its, or an expert's, parts, likewise.
        down: The last of them.
        expert_width: What config.json calls an expert's width.
        renormalizes: Whether the weights of a token's experts always sum to 1.
        text_type: The model_type of the text model that it wraps, which alone is read.
    """

    qk_norm: bool = False
    qkv_bias: bool = False
    has_experts: bool = False
    kv_heads: int | None = None
    window: int | None = None
    window_switch: bool = True
    head_dim_follows: bool = True
    scales_rope: bool = True
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    expert_width: str = "moe_intermediate_size"
    renormalizes: bool = False
    text_type: str | None = None


WRAPPED = ("language_model.model", "model.language_model")
"""What the wrapped text model, alone "model", is called in files, and by transformers 5."""
FAMILIES: Mapping[Architecture, Family] = {
    "llama": Family(),
    "mistral": Family(kv_heads=8, window=4096, window_switch=False),
    "mistral3": Family(kv_heads=8, window=4096, window_switch=False, text_type="mistral"),
    "mixtral": Family(
        has_experts=True,
        kv_heads=8,
        window_switch=False,
        mlp="block_sparse_moe",
        gate_up=("w1", "w3"),
        down="w2",
        expert_width="intermediate_size",
        renormalizes=True,
    ),
    "phi3": Family(
        window_switch=False, scales_rope=False, qkv=("qkv_proj",), gate_up=("gate_up_proj",)
    ),
    "qwen2": Family(qkv_bias=True, kv_heads=32, window=4096),
    "qwen3": Family(qk_norm=True, kv_heads=32, window=4096, head_dim_follows=False),
    "qwen3_moe": Family(
        qk_norm=True, has_experts=True, kv_heads=4, window=4096, head_dim_follows=False
    ),
    "seed_oss": Family(qkv_bias=True, kv_heads=8, head_dim_follows=False),
}


def dtypes() -> tuple[torch.dtype, ...]:
    """Dtypes of weights and activations, bf16 first."""
    import torch

    return torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A layer's mixture of experts.

    Attributes:
        num_experts: Experts of a layer.
        top_k: Experts of a token.
        intermediate_size: Width of one expert.
        renormalize: Whether the weights of a token's experts are divided by their sum.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool = True

    def __post_init__(self) -> None:
        check_count("num_experts", self.num_experts)
        check_count("top_k", self.top_k)
        check_count("moe intermediate_size", self.intermediate_size)
        if not isinstance(self.renormalize, bool):
            raise ConfigError(f"renormalize={self.renormalize!r}: give True or False")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k={self.top_k} of {self.num_experts} experts: a token can go to each expert "
                "once; lower num_experts_per_tok"
            )


def check_count(name: str, value: Any) -> None:
    """Raise ConfigError unless a value is a whole number of 1 to 2**31 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise ConfigError(f"{name}={value!r:.40}: give a whole number of 1 to {MAX_SIZE}")
