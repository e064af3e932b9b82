"""Models by name, by folder, or by configuration."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from smkern.errors import ConfigError
from smkern.limits import shown
from smkern.models.architecture import MoeConfig
from smkern.models.config import ModelConfig
from smkern.models.from_hf import token_ids
from smkern.models.hub import read_json
from smkern.models.quantization import Quantization
from smkern.rope import Llama3, Rope

_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "rope": Rope(128, theta=1e6),
    "max_position": 40_960,
    "eos_token_ids": (151_645,),
}
_LLAMA = ModelConfig(
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
_MISTRAL_NEMO = ModelConfig(
    architecture="mistral",
    vocab_size=131_072,
    hidden_size=5120,
    intermediate_size=14_336,
    num_layers=40,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope=Rope(128, theta=1e6),
    max_position=131_072,
    rms_eps=1e-5,
    eos_token_ids=(2,),
)
_QWEN25 = ModelConfig(
    architecture="qwen2",
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_q_heads=28,
    num_kv_heads=4,
    head_dim=128,
    rope=Rope(128, theta=1e6),
    max_position=131_072,
    eos_token_ids=(151_643,),
)
_QWEN3_MOE = ModelConfig(
    architecture="qwen3_moe",
    hidden_size=2048,
    intermediate_size=0,
    num_layers=48,
    num_q_heads=32,
    num_kv_heads=4,
    moe=MoeConfig(num_experts=128, top_k=8, intermediate_size=768),
    **_QWEN3,
)


def _qwen3(hidden: int, intermediate: int, num_layers: int, num_q_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=8,
        **_QWEN3,
    )


def presets() -> dict[str, ModelConfig]:
    """All named models; those whose makers publish them in fp8 too, as "-fp8"."""
    qwen3 = {
        "qwen3-8b": _qwen3(4096, 12_288, 36, 32),
        "qwen3-14b": _qwen3(5120, 17_408, 40, 40),
        "qwen3-32b": _qwen3(5120, 25_600, 64, 64),
        "qwen3-30b-a3b": _QWEN3_MOE,
    }
    blocks = Quantization("fp8-block")
    in_fp8 = {f"{name}-fp8": x.replace(quantization=blocks) for name, x in qwen3.items()}
    others = {"llama-3.1-8b": _LLAMA, "mistral-nemo": _MISTRAL_NEMO, "qwen2.5-7b": _QWEN25}
    return {**others, **qwen3, **in_fp8}


def preset(name: str) -> ModelConfig:
    """A model's configuration by name, whatever the case.

    Args:
        name: "llama-3.1-8b", "mistral-nemo", "qwen2.5-7b", "qwen3-8b", "qwen3-14b", "qwen3-32b" or
            "qwen3-30b-a3b"; of Qwen3 also with "-fp8" behind it, linear layers in blocks.

    Raises:
        ConfigError: no such preset.

    Source: the models' published config.json; Llama 3 (arXiv 2407.21783) table 3, Qwen2.5
        (arXiv 2412.15115) table 1, Qwen3 (arXiv 2505.09388) tables 1 and 2.

    Example:
        >>> from smkern.models import preset
        >>> preset("Llama-3.1-8B").num_parameters
        8030261248
    """
    known = presets()
    if not isinstance(name, str) or name.lower() not in known:
        raise ConfigError(
            f"preset {shown(name)}: {_meant(name, known)} A folder of Hugging Face's is taken by "
            "ModelConfig.from_hf and LLM"
        )
    return known[name.lower()]


def find_model(model: str | Path | ModelConfig) -> tuple[ModelConfig, Path | None]:
    """A model's configuration, and the folder of its weights if it has one.

    Args:
        model: A folder with config.json, a preset's name, or a configuration.

    Raises:
        ConfigError: none of these, or a model that is not served.
    """
    if isinstance(model, ModelConfig):
        return model, None
    folder = Path(model) if isinstance(model, (str, Path)) else None
    if folder is not None and folder.is_dir():
        config = ModelConfig.from_hf(folder)
        return config.replace(eos_token_ids=_end_tokens(config, folder)), folder
    name = str(model) if folder is not None else shown(model)
    known = presets()
    if folder is not None and name.lower() in known:
        return known[name.lower()], None
    raise ConfigError(
        f"model {name!r:.200} is neither a folder nor a preset: {_meant(name, known)} Pass a "
        "folder with config.json (`hf download` makes one of a name on the Hub), a preset or a "
        "ModelConfig"
    )


def _meant(name: object, known: Collection[str]) -> str:
    """The preset of that size whose name is near, as "Qwen/Qwen3-8B" is, or all that there are."""
    word = str(name)[:200].rpartition("/")[2].lower()
    alike = [x for x in known if re.findall(r"\d+", x) == re.findall(r"\d+", word)]
    near = get_close_matches(word, alike, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there is {sorted(known)}."


def _end_tokens(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    """The tokens that end a text: those of config.json, and of generation_config.json."""
    path = folder / "generation_config.json"
    given: Any = read_json(path, ConfigError).get("eos_token_id") if path.is_file() else None
    more = token_ids(f"eos_token_id in {path}", given)
    return tuple(dict.fromkeys((*config.eos_token_ids, *more)))
