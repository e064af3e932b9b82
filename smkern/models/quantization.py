"""How a decoder's linear layers are stored in fp8, and what configurations say of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from smkern.errors import ConfigError
from smkern.limits import FP8_BLOCK as BLOCK

Kind = Literal["fp8-block", "fp8-channel", "fp8-tensor"]
Activations = Literal["dynamic", "static"]
HEADS = "lm_head", "language_model.lm_head"
"""The head's names, the second in a model that wraps another."""
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The linear layers' weights are e4m3 times fp32 scales, and so are their inputs in a product.

    The embedding, the head, norms and the routers of experts keep the model's dtype, and so does
    the residual stream.

    Attributes:
        kind: "fp8-block": a scale for 128 x 128 weights, and one for each 128 values of a token.
            "fp8-channel": a scale for each row of a weight, and one a token. "fp8-tensor": a scale
            for each projection of the checkpoint, and one a token.
        activations: "dynamic": the inputs' scales follow from their values. "static": one scale
            an input, from the checkpoint; not of blocks.
        kv_scales: Whether the checkpoint promises scales of every layer's fp8 cache.

    Raises:
        ConfigError: a kind or a way of scaling that is not served.

    Source: blocks as in DeepSeek-V3 (arXiv 2412.19437) section 3.3.2.

    Example:
        >>> from smkern.models import Quantization
        >>> Quantization("fp8-block").activations
        'dynamic'
    """

    kind: Kind
    activations: Activations = "dynamic"
    kv_scales: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind={self.kind!r:.40}: linear layers are served in {KINDS}")
        if self.activations not in get_args(Activations):
            raise ConfigError(
                f"activations={self.activations!r:.40}: there is {get_args(Activations)}"
            )
        if self.kind == "fp8-block" and self.activations == "static":
            raise ConfigError(
                "activations='static' with kind='fp8-block': the scales of blocks follow from the "
                "values; use 'dynamic'"
            )


def quantization_from_hf(given: Any, linears: Iterable[str]) -> Quantization | None:
    """What a `quantization_config` says, or None where there is none.

    Args:
        given: The entry of a config.json.
        linears: Names of the linear layers that the decoder would run in fp8.

    Raises:
        ConfigError: another quantization than those of `Quantization`, with the entry that says so.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"quantization_config is a {type(given).__name__}: config.json must give it as an "
            "object, or null"
        )
    method = given.get("quant_method")
    if method == "fp8":
        found, kept = _fp8(given), ["modules_to_not_convert", "ignored_layers"]
    elif method == "compressed-tensors":
        found, kept = _compressed(given), ["ignore"]
    else:
        raise ConfigError(
            f"quantization_config.quant_method={method!r:.40}: there is 'fp8', and "
            "'compressed-tensors' of fp8; choose a checkpoint of one of these, or one in bf16"
        )
    _check_kept(given, kept, linears)
    return replace(found, kv_scales=given.get("kv_cache_scheme") is not None)


def _fp8(given: Mapping[str, Any]) -> Quantization:
    """`quant_method` fp8: blocks as of DeepSeek and Qwen3, or a scale a tensor."""
    _allow(given, "fmt", None, "e4m3", "float8_e4m3fn")
    _allow(given, "scale_fmt", None, "float")
    _allow(given, "expert_dtype", None, "fp8")
    _allow(given, "modules_to_convert", None, [])
    _allow(given, "dequantize", None, False)
    _allow(given, "activation_scheme", "dynamic", "static")
    if given.get("kv_cache_scheme") != "static":  # as AutoFP8 writes it
        _check_kv(given)
    _allow(given, "weight_block_size", None, [BLOCK, BLOCK], (BLOCK, BLOCK))
    kind: Kind = "fp8-tensor" if given.get("weight_block_size") is None else "fp8-block"
    return Quantization(kind, given["activation_scheme"])


_STRATEGIES: Mapping[str, Kind] = {
    "block": "fp8-block",
    "channel": "fp8-channel",
    "tensor": "fp8-tensor",
}


def _compressed(given: Mapping[str, Any]) -> Quantization:
    """compressed-tensors with one group of 8-bit floats for all linear layers."""
    _allow(given, "format", None, "float-quantized", "naive-quantized")
    _allow(given, "sparsity_config", None, {})
    _allow(given, "transform_config", None, {})
    _check_kv(given)
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused("config_groups", groups, "one group for all linear layers")
    (name, group), *_ = groups.items()
    at = f"config_groups.{name}"
    if not isinstance(group, Mapping):
        raise _refused(at, group, "an object")
    _allow(group, "targets", ["Linear"], at=at)
    _allow(group, "output_activations", None, at=at)
    _allow(group, "format", None, "float-quantized", "naive-quantized", at=at)
    weights = _eight_bits(group, "weights", at)
    _allow(weights, "dynamic", None, False, at=f"{at}.weights")
    _allow(weights, "strategy", *_STRATEGIES, at=f"{at}.weights")
    kind = _STRATEGIES[weights["strategy"]]
    if kind == "fp8-block":
        square = f"{BLOCK}x{BLOCK}"
        _allow(weights, "block_structure", [BLOCK, BLOCK], square, at=f"{at}.weights")
    inputs, where = _eight_bits(group, "input_activations", at), f"{at}.input_activations"
    if kind == "fp8-block":
        _allow(inputs, "dynamic", True, at=where)
        _allow(inputs, "strategy", "group", at=where)
        _allow(inputs, "group_size", BLOCK, at=where)
        return Quantization(kind)
    _allow(inputs, "dynamic", None, False, True, at=where)
    if inputs.get("dynamic"):
        _allow(inputs, "strategy", "token", "tensor", at=where)
        return Quantization(kind)
    _allow(inputs, "strategy", "tensor", at=where)
    return Quantization(kind, "static")


def _eight_bits(group: Mapping[str, Any], name: str, at: str) -> Mapping[str, Any]:
    """What a group says of its weights or inputs, which must be symmetric 8-bit floats."""
    found, where = group.get(name), f"{at}.{name}"
    if not isinstance(found, Mapping):
        raise _refused(where, found, "8-bit floats")
    _allow(found, "num_bits", 8, at=where)
    _allow(found, "type", "float", at=where)
    _allow(found, "symmetric", None, True, at=where)
    return found


def _check_kv(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for scales of a cache that are not one e4m3 scale a layer."""
    scheme = given.get("kv_cache_scheme")
    if scheme is None:
        return
    found = _eight_bits(given, "kv_cache_scheme", "quantization_config")
    _allow(found, "strategy", "tensor", at="kv_cache_scheme")
    _allow(found, "dynamic", None, False, at="kv_cache_scheme")


def _check_kept(given: Mapping[str, Any], entries: Iterable[str], linears: Iterable[str]) -> None:
    """Raise ConfigError where a linear layer keeps its dtype, or the head does not."""
    kept: list[str] = []
    for entry in entries:
        names = given.get(entry) or []
        if not isinstance(names, (list, tuple)) or any(not isinstance(x, str) for x in names):
            raise _refused(entry, names, "a list of names")
        kept += names
    exact = {name for name in kept if not name.startswith("re:")}
    try:
        patterns = [re.compile(name[3:]) for name in kept if name.startswith("re:")]
    except re.error as reason:
        raise _refused("ignore", reason.pattern, f"regular expressions ({reason})") from None

    def is_kept(name: str) -> bool:
        return any(part in exact for part in _prefixes(name)) or any(
            pattern.match(name) for pattern in patterns
        )

    for name in linears:
        if is_kept(name):
            raise ConfigError(
                f"quantization_config leaves {name} unquantized: all linear layers are served in "
                "fp8, or none; choose a checkpoint that quantizes them all"
            )
    if given.get("quant_method") == "compressed-tensors" and not any(map(is_kept, HEADS)):
        raise ConfigError(
            "quantization_config.ignore does not name lm_head: the head is served unquantized; "
            "choose a checkpoint that leaves it so"
        )


def _prefixes(name: str) -> Iterator[str]:
    """A module's name, and those that it lies in."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        yield ".".join(parts[:count])


def _allow(given: Mapping[str, Any], name: str, *served: Any, at: str = "") -> None:
    """Raise ConfigError unless an entry has one of these values; a bool is no number."""
    value = given.get(name)
    if not any(type(value) is type(x) and value == x for x in served):
        wanted = " or ".join(repr(x) for x in served if not isinstance(x, tuple))
        raise _refused(f"{at}.{name}" if at else name, value, wanted)


def _refused(entry: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(
        f"quantization_config: {entry}={value!r:.80} is not served, wanted {wanted}; choose "
        "another checkpoint, or one in bf16"
    )
