"""Small models of random weights for vLLM and transformers, whose tokens depend on attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 4096
QWEN3 = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 4,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rope_theta": 1_000_000.0, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2 = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "sliding_window": 96, "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
}  # fmt: skip


def _qwen3(name: str) -> tuple[float, float]:
    """Standard deviation of a matrix over 1 / sqrt(its columns), or the value of a norm."""
    if "embed_tokens" in name:
        return 64.0, 0.0
    return 4.0 if "lm_head" in name else 1.0, 1.75 if "q_norm" in name or "k_norm" in name else 1.0


def _gemma2(name: str) -> tuple[float, float]:
    """As `_qwen3`; norms count from 1. The head is the embedding, which must not find itself."""
    if "embed_tokens" in name:
        return 0.1, 0.0
    return 4.0 if "q_proj" in name else 1.0, 30.0 if name == "model.norm.weight" else 0.0


GAINS = {"qwen3": _qwen3, "gemma2": _gemma2}
MODELS: dict[str, dict[str, Any]] = {"qwen3": QWEN3, "gemma2": GEMMA2}


def write_model(kind: str, folder: Path, device: str = "cuda", **sizes: int) -> nn.Module:
    """Save a model in bf16; returns the same in fp32.

    Scores have a standard deviation of several units, so that a softmax is of few keys: where it
    is of all, every attention gives about the same. Logits have one of four: greedy tokens differ.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **MODELS[kind] | sizes)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    draw = torch.Generator(device).manual_seed(7)
    for name, weight in model.named_parameters():
        gain, fill = GAINS[kind](name)
        if weight.dim() == 1:
            weight.data.fill_(fill)
        else:
            weight.data.normal_(0.0, gain * weight.shape[-1] ** -0.5, generator=draw)
        weight.data = weight.data.bfloat16().float()
    # of a copy: the frequencies of its rotary embedding are rounded, too
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    return model.eval()


@torch.inference_mode()
def true_logprobs(model: nn.Module, prompt: list[int], tokens: list[int]) -> Tensor:
    """[tokens, vocabulary] fp32: of each token drawn, given those in front of it."""
    ids = torch.tensor([prompt + tokens[:-1]], device=next(model.parameters()).device)
    logits = model(ids).logits[0, len(prompt) - 1 :]
    return logits.float().log_softmax(-1)
