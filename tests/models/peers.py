"""Models of transformers, small ones and of real width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from smkern.models import Decoder, ModelConfig, Weights

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Mistral's layers are Llama's."""
_CLASSES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "internlm3": "InternLM3Config",
    "mixtral": "MixtralConfig",
    "phi3": "Phi3Config",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig",
    "seed_oss": "SeedOssConfig",
}
"""By name: an older transformers has not all of them."""
_AUTO = {"mistral3": transformers.AutoModelForImageTextToText}
SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    # wide enough that layers matter beside the residual stream
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 6.0}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 32,
          "num_attention_heads": 2, "patch_size": 16, "head_dim": 16}  # fmt: skip
EXPERTS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
                  "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 3},
}  # fmt: skip


def hf_config(family: str, **changes: Any) -> Any:
    """transformers' configuration of a small model of a family."""
    sizes = SMALL | EXPERTS.get(family, {})
    if family == "llama":
        sizes = sizes | {"rope_parameters": LLAMA3}
    if family == "mistral3":
        wrapper = {"tie_word_embeddings": changes.pop("tie_word_embeddings", False)}
        text = SMALL | {"model_type": "mistral", "sliding_window": None} | changes
        return transformers.Mistral3Config(text_config=text, vision_config=VISION, **wrapper)
    if family == "internlm3":
        sizes = sizes | {"rope_parameters": DYNAMIC}
    if family == "mistral":
        sizes = sizes | {"sliding_window": None}
    return getattr(transformers, _CLASSES[family])(**(sizes | changes))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a folder's only file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def assert_same(one: Weights, other: Weights) -> None:
    """All tensors are equal, in the same dtypes."""
    for got, want in zip(one.tensors(), other.tensors(), strict=True):
        assert got.dtype is want.dtype
        assert torch.equal(got.float(), want.float())  # torch compares no e4m3


@dataclass(slots=True)
class Peer:
    """transformers' eager model in fp32."""

    family: str
    model: Any

    def logits(self, ids: Sequence[int], last: int = 0) -> Tensor:
        """[tokens, vocab] fp32 of one sequence, behind its last tokens or (0) all."""
        with torch.no_grad():
            given = torch.tensor([ids], device=self.model.device)
            return self.model(given, logits_to_keep=last).logits[0].float()

    @contextmanager
    def running_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Parameters in a dtype; frequencies stay in fp32, as they are where a model is loaded."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(dtype)
        yield
        for parameter in self.model.parameters():
            parameter.data = parameter.data.float()

    def last_logits(self, texts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        """[texts, vocab] fp32 behind each text's last token, the model being run in a dtype."""
        with self.running_in(dtype):
            return torch.stack([self.logits(text, 1)[0] for text in texts])

    def decoder(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
        """Our decoder with this model's weights."""
        config = ModelConfig.from_hf(self.model.config).replace(dtype=dtype)
        return Decoder(config, Weights.from_tensors(config, self.model.state_dict(), device=device))


def make_peer(family: str, *, device: str = "cpu", **changes: Any) -> Peer:
    """A random model whose weights are bf16 numbers, norms' too, so that dtypes differ in maths."""
    config = hf_config(family, **changes)
    options = {"experts_implementation": "eager"} if family in EXPERTS else {}
    with torch.device(device):
        model = _AUTO.get(family, transformers.AutoModelForCausalLM).from_config(
            config, attn_implementation="eager", dtype=torch.float32, **options
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_(1.0, 0.1)
            else:  # a bias is as large as what it is added to
                std = config.get_text_config().initializer_range if parameter.dim() > 1 else 0.5
                parameter.normal_(0.0, std)
            parameter.copy_(parameter.bfloat16())
    return Peer(family, model.eval())


def prompts(counts: Sequence[int], vocab: int = SMALL["vocab_size"]) -> list[list[int]]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in counts]


def error(got: Tensor, want: Tensor, family: str) -> float:
    """Root mean square of a difference of [rows, vocab].

    Of a mixture of experts the median row's: where two experts are as good as equal, rounding
    decides, ours or theirs, and such a row is far off in either.
    """
    rows = (got - want).square().mean(-1)
    return (rows.median() if family == "qwen3_moe" else rows.mean()).sqrt().item()
