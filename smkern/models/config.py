"""The sizes of a decoder, from a Hugging Face configuration or a preset."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from smkern.errors import ConfigError
from smkern.limits import FP8_BLOCK, HEAD_DIMS
from smkern.models.architecture import (
    ARCHITECTURES,
    FAMILIES,
    Architecture,
    Family,
    MoeConfig,
    check_count,
    dtypes,
)
from smkern.models.from_hf import fields_from_hf, token_ids
from smkern.models.hub import read_json
from smkern.models.quantization import Quantization
from smkern.rope import Rope
from smkern.tuning.attention.constraints import writes_e4m3
from smkern.tuning.moe import MAX_EXPERTS, MAX_TOP_K
from smkern.tuning.rows import MAX_WIDTH
from smkern.tuning.sample import MAX_VOCAB

if TYPE_CHECKING:
    import torch

_KNOWN = tuple(ARCHITECTURES.values())
_BF16 = cast("torch.dtype", "bf16, looked up when it is asked for")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of a decoder of one of the architectures that are served.

    Attributes:
        architecture: Which of `ARCHITECTURES`' values; `family` says what sets it apart.
        vocab_size: Rows of the embedding and of the head.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of a dense MLP; 0 where there is none.
        num_layers: Layers.
        num_q_heads: Query heads, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads.
        head_dim: 64, 96, 128 or 256.
        rope: The rotary embedding.
        max_position: Tokens of the longest context.
        rms_eps: Epsilon of all RMS norms.
        tied: Whether the head's weights are the embedding's.
        moe: The mixture of experts, or None.
        initializer_range: Standard deviation of random weights.
        dtype: Dtype of weights and activations; of a quantized model of what is not fp8.
        eos_token_ids: Tokens that end a text; of one, of a list or of None a tuple is made.
        quantization: How the linear layers are stored in fp8, or None.

    Raises:
        ConfigError: sizes that cannot be, or that the operators do not serve.

    Example:
        >>> from smkern.models import preset
        >>> preset("qwen3-8b").replace(num_layers=4).qkv_size
        6144
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    max_position: int
    rms_eps: float = 1e-6
    tied: bool = False
    moe: MoeConfig | None = None
    initializer_range: float = 0.02
    dtype: torch.dtype = _BF16
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, str) or self.architecture not in _KNOWN:
            known = sorted(ARCHITECTURES.values())
            raise ConfigError(f"architecture={self.architecture!r}: there is {known}")
        names = ("vocab_size", "hidden_size", "num_layers", "num_q_heads", "num_kv_heads",
                 "head_dim", "max_position")  # fmt: skip
        for name in names:
            check_count(name, getattr(self, name))
        _check_widths(self)
        if self.moe is not None and not isinstance(self.moe, MoeConfig):
            raise ConfigError(f"moe is a {type(self.moe).__name__}: pass a MoeConfig, or None")
        if self.family.has_experts != (self.moe is not None):
            mixtures = [name for name, family in FAMILIES.items() if family.has_experts]
            raise ConfigError(
                f"architecture {self.architecture!r} with moe={self.moe}: {' and '.join(mixtures)} "
                "have experts, the others have none"
            )
        if not isinstance(self.rope, Rope):
            raise ConfigError(f"rope is a {type(self.rope).__name__}: pass a Rope")
        if self.moe is None:
            check_count("intermediate_size", self.intermediate_size)
        else:
            _check_experts(self.moe)
        _check_heads(self)
        _check_blocks(self)
        for name in ("rms_eps", "initializer_range"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < 1e30:
                raise ConfigError(f"{name}={value!r:.40}: give a finite number of at least 0")
        if not isinstance(self.tied, bool):
            raise ConfigError(f"tied={self.tied!r}: give True or False")
        eos = token_ids("eos_token_ids", self.eos_token_ids)
        object.__setattr__(self, "eos_token_ids", eos)
        if self.dtype is _BF16:
            object.__delattr__(self, "dtype")
        elif not any(self.dtype is served for served in dtypes()):
            raise ConfigError(f"dtype={self.dtype}: there is {[str(x) for x in dtypes()]}")

    def __getattr__(self, name: str) -> Any:
        """The default dtype, when it is first asked for: what needs sizes alone loads no torch."""
        if name != "dtype":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, "dtype", dtypes()[0])
        return self.dtype

    @classmethod
    def from_hf(cls, source: Any) -> ModelConfig:
        """The configuration of a Hugging Face model.

        Args:
            source: A folder with a config.json, such a file, its contents as a mapping, or a
                transformers configuration (anything with `to_dict`).

        Raises:
            ConfigError: no such file, an architecture that is not there, or one of its options
                that the operators do not serve.
        """
        if isinstance(source, (str, Path)):
            path = Path(source)
            source = read_json(path / "config.json" if path.is_dir() else path, ConfigError)
        elif hasattr(source, "to_dict"):
            source = source.to_dict()
        if not isinstance(source, Mapping):
            raise ConfigError(
                f"a {type(source).__name__} is no configuration: pass a folder, a config.json, its "
                "contents, or what has to_dict"
            )
        return cls(**fields_from_hf(source))

    def replace(self, **changes: Any) -> ModelConfig:
        """This configuration with other values, for instance `num_layers=4`."""
        try:
            object.__getattribute__(self, "dtype")
        except AttributeError:  # nobody asked for it yet: nor does this
            changes.setdefault("dtype", _BF16)
        return dataclasses.replace(self, **changes)

    @property
    def family(self) -> Family:
        """What its architecture has."""
        return FAMILIES[self.architecture]

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed by head."""
        return self.family.qk_norm

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have a bias."""
        return self.family.qkv_bias

    @property
    def q_size(self) -> int:
        """Columns of all query heads."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of all key heads, or value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size

    @property
    def attends_in_e4m3(self) -> bool:
        """Whether attention itself writes what the output product of blocks reads."""
        given = self.quantization
        return (
            given is not None
            and given.kind == "fp8-block"
            and writes_e4m3(self.num_q_heads, self.num_kv_heads, self.head_dim)
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the caches of all layers."""
        try:
            element_bytes = object.__getattribute__(self, "dtype").itemsize
        except AttributeError:  # the default, that nobody has asked for: loads no torch
            element_bytes = 2
        return 2 * self.num_layers * self.kv_size * element_bytes

    @property
    def linear_bytes(self) -> int:
        """Bytes of a number in a linear layer's weight: 1 in fp8, else 2, whatever the dtype."""
        return 2 if self.quantization is None else 1

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        hidden, heads = self.hidden_size, 2 * self.head_dim if self.qk_norm else 0
        biases = self.qkv_size if self.qkv_bias else 0
        layer = self._linear_parameters + 2 * hidden + heads + biases
        if self.moe is not None:
            layer += self.moe.num_experts * hidden
        tables = (1 if self.tied else 2) * self.vocab_size * hidden
        return self.num_layers * layer + tables + hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on a GPU, where 2 are those of a number that is not fp8; scales, at
        most a thousandth of it, are left out."""
        linear = self.num_layers * self._linear_parameters
        return 2 * (self.num_parameters - linear) + self.linear_bytes * linear

    @property
    def _linear_parameters(self) -> int:
        """Parameters of a layer's projections, and of its MLP or experts."""
        moe, wide = self.moe, 3 * self.hidden_size
        if moe is None:
            inner = wide * self.intermediate_size
        else:
            inner = moe.num_experts * wide * moe.intermediate_size
        return self.hidden_size * (self.qkv_size + self.q_size) + inner


def _check_widths(config: ModelConfig) -> None:
    """Raise ConfigError unless norms and sampling serve rows so wide."""
    widths = (
        ("hidden_size", MAX_WIDTH, "norms serve"),
        ("vocab_size", MAX_VOCAB, "sampling serves"),
    )
    for name, most, served in widths:
        if getattr(config, name) > most:
            raise ConfigError(
                f"{name}={getattr(config, name)}: {served} at most {most}; choose another model"
            )


def _check_blocks(config: ModelConfig) -> None:
    """Raise ConfigError unless whole blocks make every projection."""
    given = config.quantization
    if given is None:
        return
    if not isinstance(given, Quantization):
        raise ConfigError(f"quantization is a {type(given).__name__}: pass a Quantization, or None")
    width = config.intermediate_size if config.moe is None else config.moe.intermediate_size
    sizes = {
        "hidden_size": config.hidden_size,
        "q_size": config.q_size,
        "kv_size": config.kv_size,
        "intermediate_size": width,
    }
    for name, size in sizes.items():
        if given.kind == "fp8-block" and size % FP8_BLOCK:
            raise ConfigError(
                f"{name}={size} with quantization 'fp8-block': blocks have {FP8_BLOCK} rows and "
                "columns, and projections are made of whole ones; use 'fp8-channel'"
            )


def _check_experts(moe: MoeConfig) -> None:
    """Raise ConfigError unless routing serves so many experts."""
    if moe.num_experts > MAX_EXPERTS or moe.top_k > MAX_TOP_K:
        raise ConfigError(
            f"{moe.top_k} of {moe.num_experts} experts a token: routing serves at most "
            f"{MAX_TOP_K} of {MAX_EXPERTS}; choose another model"
        )


def _check_heads(config: ModelConfig) -> None:
    """Raise ConfigError unless attention serves these heads."""
    if config.num_q_heads % config.num_kv_heads:
        raise ConfigError(
            f"{config.num_q_heads} query heads over {config.num_kv_heads} KV heads: attention "
            "serves whole groups; repeat KV heads in the checkpoint until they divide"
        )
    if config.head_dim not in HEAD_DIMS:
        raise ConfigError(
            f"head_dim={config.head_dim}: attention serves {list(HEAD_DIMS)}; choose a model with "
            "one of these"
        )
    if config.rope.rotary_dim > config.head_dim:
        raise ConfigError(
            f"rotary_dim={config.rope.rotary_dim} of heads with {config.head_dim} dimensions: "
            "lower partial_rotary_factor to 1 or less"
        )
