"""Small models of the families that attention serves, with weights that make tokens differ."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 97
_SIZES: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": VOCABULARY, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 2048,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {
        "sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64,
        "final_logit_softcapping": None, "tie_word_embeddings": False,
    },
    "GptOss": {"sliding_window": 8, "num_local_experts": 4, **_EXPERTS},
}  # fmt: skip


def config_of(family: str, **changes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")(**_SIZES | FAMILIES[family] | changes)


def model_of(family: str, implementation: str, **changes: Any) -> Any:
    """A causal model in eval mode; equal weights for equal sizes, whatever the implementation."""
    from transformers import AutoModelForCausalLM

    config = config_of(family, **changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        std = 2.0 if name.endswith("sinks") else 0.15
        drawn = torch.randn(parameter.shape, generator=generator) * std
        is_norm = "norm" in name and "gemma" not in family.lower()
        parameter.data.copy_(drawn + 1 if is_norm else drawn)
    return model


def pair_of(family: str, **changes: Any) -> tuple[Any, Any]:
    """The model with eager attention, and with ours."""
    return model_of(family, "eager", **changes), model_of(family, "smkern", **changes)


def prompts(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


def padded(ids: torch.Tensor, pads: list[int]) -> torch.Tensor:
    """An attention mask whose rows begin with so much padding."""
    return (torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]).long()
