"""fp8 checkpoints as their makers write them: configurations, and files of a few small layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from smkern.models import ModelConfig, Quantization
from tests.models.peers import hf_config, make_peer

FP8 = torch.float8_e4m3fn
BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.norm"],
}
"""As of Qwen3's FP8 checkpoints."""
TENSOR: dict[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "ignored_layers": ["lm_head"],
    "kv_cache_scheme": "static",
}
"""As AutoFP8 writes it."""


def compressed(weights: str, inputs: str, *, dynamic: bool = True, **entries: Any) -> Any:
    """compressed-tensors' configuration of 8-bit floats for all linear layers."""
    shared = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None}
    more = {"block_structure": [128, 128]} if weights == "block" else {}
    group = {
        "targets": ["Linear"],
        "weights": shared | {"dynamic": False, "strategy": weights, **more},
        "input_activations": shared | {"dynamic": dynamic, "strategy": inputs},
        "output_activations": None,
    }
    if inputs == "group":
        group["input_activations"]["group_size"] = 128
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        **entries,
    }


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
CONFIGS: dict[str, tuple[dict[str, Any], Quantization]] = {
    "blocks": (BLOCKS, Quantization("fp8-block")),
    "compressed blocks": (compressed("block", "group"), Quantization("fp8-block")),
    "channels": (compressed("channel", "token"), Quantization("fp8-channel")),
    "tensors": (compressed("tensor", "token"), Quantization("fp8-tensor")),
    "static": (compressed("tensor", "tensor", dynamic=False), Quantization("fp8-tensor", "static")),
    "static channels": (
        compressed("channel", "tensor", dynamic=False, kv_cache_scheme=KV),
        Quantization("fp8-channel", "static", kv_scales=True),
    ),
    "autofp8": (TENSOR, Quantization("fp8-tensor", "static", kv_scales=True)),
}
"""By what is said of them: a configuration, and what it means."""
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip


def quantized(weight: Tensor, how: str) -> tuple[Tensor, Tensor]:
    """A weight [N, K] in e4m3 and its scales as checkpoints hold them, element by element."""
    rows, columns = weight.shape
    grid = {"block": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[how]
    values = torch.empty_like(weight, dtype=FP8)
    scales = torch.empty(rows // grid[0], columns // grid[1])
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * grid[0], (i + 1) * grid[0]), slice(j * grid[1], (j + 1) * grid[1]))
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] * (1 / scales[i, j])).to(FP8)
    return values, scales[0, 0] if how == "tensor" else scales


def is_linear(name: str) -> bool:
    """Whether a checkpoint's tensor is a linear layer's weight in fp8."""
    return "vision" not in name and name.endswith(
        ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    )


def sizes_of(family: str) -> dict[str, int]:
    """Sizes of whole blocks, those of experts too."""
    return SIZES | ({"moe_intermediate_size": 128} if family == "qwen3_moe" else {})


def config_of(family: str = "qwen3") -> ModelConfig:
    """A model of these sizes, in fp32."""
    return ModelConfig.from_hf(hf_config(family, **sizes_of(family))).replace(dtype=torch.float32)


def write(folder: Path, kind: str, family: str = "qwen3", **changes: Any) -> dict[str, Tensor]:
    """Write a small checkpoint of one of `CONFIGS`; returns its tensors."""
    written, means = CONFIGS[kind]
    sizes = sizes_of(family) | changes
    torch.manual_seed(11)
    peer = make_peer(family, **sizes)
    how = means.kind.removeprefix("fp8-")
    scale = ".weight_scale_inv" if written is BLOCKS else ".weight_scale"
    tensors: dict[str, Tensor] = {}
    for number, (name, weight) in enumerate(hub_tensors(peer.model).items()):
        tensors[name] = weight.contiguous()
        if not is_linear(name):
            continue
        base = name.removesuffix(".weight")
        tensors[name], tensors[base + scale] = quantized(weight, how)
        if means.activations == "static":
            tensors[f"{base}.input_scale"] = torch.tensor(0.01 + number / 4096)
    if means.kv_scales:
        for layer in range(2):
            base = f"model.layers.{layer}.self_attn"
            tensors[f"{base}.k_scale"] = torch.tensor([0.5 + layer])
            tensors[f"{base}.v_scale"] = torch.tensor(0.25 + layer)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = hf_config(family, **sizes, dtype="float32").to_dict()
    document = config | {"architectures": [type(peer.model).__name__]}
    document["quantization_config"] = written
    (folder / "config.json").write_text(json.dumps(document))
    return tensors


def hub_tensors(model: Any) -> dict[str, Tensor]:
    """A transformers model's tensors by the names that checkpoints use: an expert a tensor."""
    found: dict[str, Tensor] = {}
    mixtral = model.config.model_type == "mixtral"
    for name, tensor in model.state_dict().items():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = tensor
            continue
        base, _, which = name.rpartition(".")
        wide, narrow = ("w1", "w3"), ("w2",)
        if not mixtral:
            wide, narrow = ("gate_proj", "up_proj"), ("down_proj",)
        parts = wide if which == "gate_up_proj" else narrow
        for expert, weight in enumerate(tensor):
            for part, piece in zip(parts, weight.chunk(len(parts)), strict=True):
                found[f"{base}.{expert}.{part}.weight"] = piece
    return found
