"""Hugging Face configurations of what is served; the rest is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from smkern.errors import ArgumentError, ConfigError
from smkern.limits import MAX_SIZE
from smkern.models.architecture import (
    ARCHITECTURES,
    FAMILIES,
    WRAPPED,
    Architecture,
    Family,
    MoeConfig,
    dtypes,
)
from smkern.models.quantization import quantization_from_hf
from smkern.rope import Rope, Yarn

if TYPE_CHECKING:
    import torch

OTHER_TYPES: Mapping[Architecture, tuple[str, ...]] = {"llama": ("internlm3", "iquestcoder")}
"""Types of which transformers makes the same model."""
OF_WRAPPERS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Entries of a model that wraps another which count before the other's."""
OWN_OPTIONS: Mapping[Architecture, dict[str, tuple[Any, ...]]] = {
    "llama": {"bias": (None, False), "qkv_bias": (None, False)},
    "qwen3_moe": {"decoder_sparse_step": (None, 1), "mlp_only_layers": (None, [], ())},
    "seed_oss": {"attention_out_bias": (None, False)},
}
"""Entries that only an architecture's files have, and what is served of them."""
DEFAULT_WINDOW_LAYERS = 28
"""transformers' max_window_layers of Qwens."""
MOST_LAYERS = 512
"""Layers whose names are compared with those that a checkpoint leaves unquantized."""


def fields_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the `ModelConfig` that the contents of a config.json describe.

    Raises:
        ConfigError: naming the entry, its value, what is served and what to do.
    """
    architecture = _architecture(hf)
    family = FAMILIES[architecture]
    if family.text_type is not None:
        hf = _text_of(hf, family.text_type)
    num_q_heads = _need(hf, "num_attention_heads")
    hidden_size = _need(hf, "hidden_size")
    if hf.get("head_dim") is not None:
        head_dim = _need(hf, "head_dim")
    elif not family.head_dim_follows:
        raise ConfigError("head_dim is missing: add it to config.json")
    else:
        head_dim = hidden_size // max(num_q_heads, 1)
    moe = _moe(hf, family) if family.has_experts else None
    try:
        rope = Rope.from_config({**hf, "head_dim": head_dim})
    except (ArgumentError, AttributeError, TypeError, ValueError, ArithmeticError) as reason:
        raise ConfigError(f"the rotary embedding cannot be served: {reason}") from None
    if rope.scaling is not None and not family.scales_rope:
        raise ConfigError(
            f"RoPE of {architecture} scaled by {type(rope.scaling).__name__}: it is served "
            "unscaled; choose a model without rope_scaling"
        )
    if rope.rotary_dim != head_dim:
        raise ConfigError(
            f"partial_rotary_factor={rope.rotary_dim / max(head_dim, 1):g}: the heads of "
            f"{architecture} rotate whole; remove it, or choose another model"
        )
    max_position = _max_position(hf, rope)
    _check_served(hf, architecture, max_position)
    num_layers = _need(hf, "num_hidden_layers")
    num_kv_heads = hf.get("num_key_value_heads", family.kv_heads)
    linears = _linears(num_layers, family)
    return {
        "architecture": architecture,
        "vocab_size": _need(hf, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": 0 if moe is not None else _need(hf, "intermediate_size"),
        "num_layers": num_layers,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_q_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": head_dim,
        "rope": rope,
        "max_position": max_position,
        "rms_eps": _number(hf, "rms_norm_eps", 1e-6),
        "tied": _flag(hf, "tie_word_embeddings"),
        "moe": moe,
        "initializer_range": _number(hf, "initializer_range", 0.02),
        "dtype": _dtype(hf),
        "quantization": quantization_from_hf(hf.get("quantization_config"), linears),
        "eos_token_ids": token_ids("eos_token_id", hf.get("eos_token_id")),
    }


def _get(hf: Mapping[str, Any], name: str, default: Any) -> Any:
    value = hf.get(name)
    return default if value is None else value


def _need(hf: Mapping[str, Any], name: str) -> Any:
    return _whole(name, hf.get(name))


def _whole(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r}: config.json must give it as a whole number")
    return value


def _number(hf: Mapping[str, Any], name: str, default: float) -> float:
    value = _get(hf, name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e30:
        raise ConfigError(f"{name}={value!r}: config.json must give it as a finite number")
    return float(value)


def _flag(hf: Mapping[str, Any], name: str) -> bool:
    value = _get(hf, name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: config.json must give it as true or false")
    return value


def _names(hf: Mapping[str, Any], name: str) -> list[str]:
    given = hf.get(name) or []
    if not isinstance(given, (list, tuple)) or any(not isinstance(x, str) for x in given):
        raise ConfigError(f"{name}={given!r}: config.json must give it as a list of names")
    return list(given)


def _architecture(hf: Mapping[str, Any]) -> Architecture:
    named = _names(hf, "architectures")
    model_type = str(hf.get("model_type"))
    for name in named:
        if name in ARCHITECTURES:
            _check_type(name, model_type, hf)
            return ARCHITECTURES[name]
    for architecture in () if named else ARCHITECTURES.values():
        if model_type in _types(architecture):
            return architecture
    raise ConfigError(
        f"architectures={named} with model_type={hf.get('model_type')!r}: there is "
        f"{sorted(ARCHITECTURES)}; choose a model of one of these"
    )


def _types(architecture: Architecture) -> set[str]:
    return {architecture, *OTHER_TYPES.get(architecture, ())}


def _check_type(name: str, model_type: str, hf: Mapping[str, Any]) -> None:
    """Raise ConfigError for an architecture of another model's type, whose maths differ."""
    served = _types(ARCHITECTURES[name])
    if hf.get("model_type") is not None and model_type not in served:
        raise ConfigError(
            f"architectures names {name} with model_type={model_type!r}: they disagree, and "
            f"transformers goes by the type; give it as one of {sorted(served)}, or choose another "
            "model"
        )


def _max_position(hf: Mapping[str, Any], rope: Rope) -> int:
    """The longest context: a file may leave what it was before YaRN stretched it, as Qwen's model
    cards say, and as vLLM reads it."""
    given, scaling = _need(hf, "max_position_embeddings"), rope.scaling
    if not isinstance(scaling, Yarn):
        return int(given)
    return max(given, int(scaling.factor * scaling.original_max_position))


def _check_served(hf: Mapping[str, Any], architecture: Architecture, max_position: int) -> None:
    """Raise ConfigError for options that change the maths and are not served."""
    wanted: dict[str, tuple[Any, ...]] = {
        "mlp_bias": (None, False),
        "hidden_act": (None, "swish", "silu"),
        "is_encoder_decoder": (None, False),
        "is_causal": (None, True),
    }
    if architecture != "qwen2":  # whose layers have one, whatever a file says
        wanted["attention_bias"] = (None, FAMILIES[architecture].qkv_bias)
    wanted |= OWN_OPTIONS.get(architecture, {})
    for name, served in wanted.items():
        value = hf.get(name)
        if value not in served:
            raise ConfigError(
                f"{name}={value!r}: the operators serve {served[-1]!r} alone; convert the "
                "checkpoint, or choose another model"
            )
    _check_windows(hf, architecture, max_position)


def _check_windows(hf: Mapping[str, Any], architecture: Architecture, max_position: int) -> None:
    """Raise ConfigError for layers that do not attend to the whole context."""
    kinds = [kind for kind in _names(hf, "layer_types") if kind != "full_attention"]
    if any(kind != "sliding_attention" for kind in kinds):
        raise ConfigError(
            f"layer_types names {sorted(set(kinds))}: the decoder's layers attend to the whole "
            "context; choose a model with full attention"
        )
    # Qwens have a sliding_window that use_sliding_window turns off where a file does not say it,
    # and max_window_layers that attend to everything all the same.
    family, is_qwen = FAMILIES[architecture], architecture.startswith("qwen")
    used = not family.window_switch or bool(hf.get("use_sliding_window", not is_qwen))
    if is_qwen and hf.get("layer_types"):  # which decide alone
        used = False
    elif is_qwen:
        full = _whole("max_window_layers", _get(hf, "max_window_layers", DEFAULT_WINDOW_LAYERS))
        used = used and full < _need(hf, "num_hidden_layers")
    window = hf.get("sliding_window", family.window)
    masks_nothing = window is not None and _whole("sliding_window", window) >= max_position
    if (kinds or (used and window is not None)) and not masks_nothing:
        raise ConfigError(
            f"sliding_window={window!r} on {len(kinds) or 'all'} layers: the decoder's layers "
            "attend to the whole context; choose a model with full attention"
        )


def _moe(hf: Mapping[str, Any], family: Family) -> MoeConfig:
    experts = "num_experts" if hf.get("num_experts") is not None else "num_local_experts"
    return MoeConfig(
        num_experts=_need(hf, experts),
        top_k=_need(hf, "num_experts_per_tok"),
        intermediate_size=_need(hf, family.expert_width),
        renormalize=family.renormalizes or _flag(hf, "norm_topk_prob"),
    )


def _text_of(hf: Mapping[str, Any], served: str) -> Mapping[str, Any]:
    """The entries of a wrapped text model, and those that the wrapper has for all its models."""
    text = hf.get("text_config")
    if not isinstance(text, Mapping) or text.get("model_type") != served:
        kind = text.get("model_type") if isinstance(text, Mapping) else text
        raise ConfigError(
            f"text_config of model_type {kind!r:.40}: there is {served!r}; choose another model"
        )
    return {**text, **{name: hf[name] for name in OF_WRAPPERS if hf.get(name) is not None}}


def _linears(num_layers: int, family: Family) -> Iterator[str]:
    """The linear layers of a decoder, of a mixture the first expert's; of very many layers the
    first."""
    mlp = f"{family.mlp}.experts.0" if family.has_experts else family.mlp
    names = [f"self_attn.{x}" for x in (*family.qkv, "o_proj")]
    names += [f"{mlp}.{x}" for x in (*family.gate_up, family.down)]
    for index in range(min(num_layers, MOST_LAYERS)):
        for prefix in ("model",) if family.text_type is None else WRAPPED:
            yield from (f"{prefix}.layers.{index}.{name}" for name in names)


def _dtype(hf: Mapping[str, Any]) -> torch.dtype:
    given = _get(hf, "dtype", _get(hf, "torch_dtype", "bfloat16"))
    names = {str(dtype).removeprefix("torch."): dtype for dtype in dtypes()}
    name = str(given).removeprefix("torch.")
    if name not in names:
        raise ConfigError(f"dtype={given!r}: there is {sorted(names)}; convert the checkpoint")
    return names[name]


def token_ids(name: str, given: Any) -> tuple[int, ...]:
    """The token ids of an entry that holds one, several or none.

    Raises:
        ConfigError: anything else.
    """
    found = [] if given is None else given if isinstance(given, (list, tuple)) else [given]
    for token in found:
        if isinstance(token, bool) or not isinstance(token, int) or abs(token) > MAX_SIZE:
            raise ConfigError(f"{name}={given!r:.80}: give a token id, a list of them, or null")
    return tuple(found)
