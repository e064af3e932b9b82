"""Models by name: the shapes that benches and examples speak of, without a checkpoint."""

from __future__ import annotations

from smkern.errors import ConfigError
from smkern.models.architecture import MoeConfig
from smkern.models.config import ModelConfig
from smkern.ops.rope import Llama3, Rope


def _qwen3(hidden: int, intermediate: int, num_layers: int, num_q_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=8,
        head_dim=128,
        rope=Rope(128, theta=1e6),
        max_position=40_960,
        eos_token_ids=(151_645,),
    )


def _qwen3_moe() -> ModelConfig:
    return ModelConfig(
        architecture="qwen3_moe",
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=0,
        num_layers=48,
        num_q_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rope=Rope(128, theta=1e6),
        max_position=40_960,
        moe=MoeConfig(num_experts=128, top_k=8, intermediate_size=768),
        eos_token_ids=(151_645,),
    )


def _llama() -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_q_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rope=Rope(128, theta=500_000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192)),
        max_position=131_072,
        rms_eps=1e-5,
        eos_token_ids=(128_001,),
    )


def presets() -> dict[str, ModelConfig]:
    """All named models."""
    return {
        "llama-3.1-8b": _llama(),
        "qwen3-8b": _qwen3(4096, 12_288, 36, 32),
        "qwen3-14b": _qwen3(5120, 17_408, 40, 40),
        "qwen3-32b": _qwen3(5120, 25_600, 64, 64),
        "qwen3-30b-a3b": _qwen3_moe(),
    }


def preset(name: str) -> ModelConfig:
    """A model's configuration by name, whatever the case.

    Args:
        name: "llama-3.1-8b", "qwen3-8b", "qwen3-14b", "qwen3-32b" or "qwen3-30b-a3b".

    Raises:
        ConfigError: no such preset.

    Source: the models' published config.json; Llama 3 (arXiv 2407.21783) table 3, Qwen3
        (arXiv 2505.09388) tables 1 and 2.

    Example:
        >>> from smkern.models import preset
        >>> preset("Llama-3.1-8B").num_parameters
        8030261248
    """
    known = presets()
    if name.lower() not in known:
        raise ConfigError(
            f"preset {name!r}: there is {sorted(known)}; for another model pass its folder to "
            "ModelConfig.from_hf"
        )
    return known[name.lower()]
