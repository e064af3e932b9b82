"""Models of random weights for vLLM and transformers, whose tokens depend on attention."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smkern.bench.engines.cases import BLOCKS
from smkern.models.layer_quantizing import quantize_weight
from smkern.models.quantization import Kind
from smkern.ops.reference.fp8 import dequantize
from tests.models.fp8_checkpoints import compressed

VOCAB = 4096
QWEN3 = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "rope_theta": 1_000_000.0, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA2 = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": VOCAB,
    "max_position_embeddings": 4096, "sliding_window": 96, "attn_logit_softcapping": 20.0,
    "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
}  # fmt: skip
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What vLLM keeps in one matrix."""


def _qwen3(name: str) -> tuple[float, float]:
    """Standard deviation of a matrix over 1 / sqrt(its columns), or the value of a norm."""
    if "embed_tokens" in name:
        return 256.0, 0.0
    return 4.0 if "lm_head" in name else 1.0, 1.75 if "q_norm" in name or "k_norm" in name else 1.0


def _gemma2(name: str) -> tuple[float, float]:
    """As `_qwen3`; norms count from 1. The head is the embedding, which must not find itself."""
    if "embed_tokens" in name:
        return 0.1, 0.0
    return 4.0 if "q_proj" in name else 1.0, 30.0 if name == "model.norm.weight" else 0.0


GAINS = {"qwen3": _qwen3, "gemma2": _gemma2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3-short": QWEN3 | {"num_hidden_layers": 4},
    "qwen3-8layers": QWEN3 | {"num_hidden_layers": 8},
    "qwen3-blocks": QWEN3 | {"num_hidden_layers": 4},
    "qwen3-channels": QWEN3 | {"num_hidden_layers": 4},
    "gemma2": GEMMA2,
}
"""All of Qwen3-8B's layers, of which ten times the memory; some of them; Gemma-2's attention."""
FP8: dict[str, tuple[Kind, dict[str, Any], str]] = {
    "qwen3-blocks": ("fp8-block", BLOCKS, "weight_scale_inv"),
    "qwen3-channels": ("fp8-channel", compressed("channel", "token"), "weight_scale"),
}
"""Of models whose linear layers come in fp8: how, what config.json says, and their scales' name."""


def draw(kind: str, name: str, weight: Tensor) -> None:
    """Fill a weight as its name says, in bf16's values: the same in every process that names it.

    Scores have a standard deviation of several units, so that a softmax is of few keys: where it
    is of all, every attention gives about the same. Logits have one of four: greedy tokens differ.
    Embeddings are as large as what some layers add, so that rounding does not grow over 36 layers
    until the tokens of two runs have nothing to do with each other.
    """
    gain, fill = GAINS[kind.partition("-")[0]](name)
    if weight.dim() == 1:
        weight.fill_(fill)
        return
    numbers = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    drawn = torch.empty(weight.shape, device=weight.device)
    drawn.normal_(0.0, gain * weight.shape[-1] ** -0.5, generator=numbers)
    weight.copy_(drawn.bfloat16())


def draw_fused(kind: str, name: str, weight: Tensor) -> None:
    """As `draw`, of a weight of vLLM's: its parts have other models' names."""
    fused = next((part for part in PARTS if part in name), None)
    if fused is None or weight.dim() == 1:
        draw(kind, name, weight)
        return
    sizes = MODELS[kind]
    heads = (sizes["num_attention_heads"], *2 * [sizes["num_key_value_heads"]])
    rows = {
        "qkv_proj": [sizes["head_dim"] * count for count in heads],
        "gate_up_proj": 2 * [sizes["intermediate_size"]],
    }[fused]
    for part, piece in zip(PARTS[fused], weight.split(rows), strict=True):
        draw(kind, name.replace(fused, part), piece)


def _config(kind: str) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind.partition("-")[0], **MODELS[kind])
    config.architectures = [{"q": "Qwen3ForCausalLM", "g": "Gemma2ForCausalLM"}[kind[0]]]
    config.dtype = torch.bfloat16
    return config


def write_config(kind: str, folder: Path) -> None:
    """A folder that vLLM starts from, with weights that nobody reads."""
    _config(kind).save_pretrained(folder)


def _is_fp8(kind: str, name: str) -> bool:
    return kind in FP8 and name.endswith("_proj.weight")


def write_checkpoint(kind: str, folder: Path, device: str = "cuda") -> None:
    """A folder that vLLM loads weights in fp8 from."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.bfloat16)
    how, said, scale_name = FP8[kind]
    tensors = {}
    for name, weight in model.named_parameters():
        drawn = torch.empty_like(weight, device=device, requires_grad=False)
        draw(kind, name, drawn)
        if _is_fp8(kind, name):
            drawn, scales = quantize_weight(drawn, how, (weight.shape[0],))
            tensors[name.removesuffix("weight") + scale_name] = scales.cpu()
        tensors[name] = drawn.cpu()
    config = _config(kind)
    config.quantization_config = said
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def true_model(kind: str) -> nn.Module:
    """The model in fp32; of one in fp8 what its weights and scales stand for."""
    from transformers import AutoModelForCausalLM

    with torch.device("cuda"):
        model: nn.Module = AutoModelForCausalLM.from_config(
            _config(kind), dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            draw(kind, name, weight)
            if _is_fp8(kind, name):
                stored = quantize_weight(weight.bfloat16(), FP8[kind][0], (weight.shape[0],))
                weight.copy_(dequantize(*stored))
    return model.eval()


@torch.inference_mode()
def true_logprobs(model: nn.Module, prompt: list[int], tokens: list[int]) -> Tensor:
    """[tokens, vocabulary] fp32: of each token drawn, given those in front of it."""
    ids = torch.tensor([prompt + tokens[:-1]], device=next(model.parameters()).device)
    hidden = model.get_submodule("model")(ids).last_hidden_state[0, len(prompt) - 1 :]
    logits = model.get_submodule("lm_head")(hidden).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        logits = cap * (logits / cap).tanh()
    return logits.log_softmax(-1)
