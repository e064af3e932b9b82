"""Rotary position embeddings: frequencies of a model, and the table of cosines and sines.

Sines of large angles need range reduction and more than fp32 (an angle of 131072 radians in fp32 is
off by 0.008), so kernels read a table that is made once on the host in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import TYPE_CHECKING, Any

from smkern.device import torch_device
from smkern.errors import ArgumentError
from smkern.limits import as_int, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MOST = 2.0**63
MAX_DIM = 1 << 16
MAX_TABLE_STEP = 1 << 16
"""Positions whose fp64 angles are held at once."""


def _check(name: str, value: float, least: float, *, above: bool = False) -> None:
    """Raise ArgumentError unless a number is finite and at least (or above) a limit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < MOST:
        raise ArgumentError(f"{name}={shown(value)} is no finite number below {MOST:g}: pass one")
    if value < least or (above and value == least):
        raise ArgumentError(
            f"{name}={value!r}: it must be {'above' if above else 'at least'} {least}"
        )


@dataclass(frozen=True, slots=True)
class Linear:
    """Positions divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        _check("factor", self.factor, 0, above=True)


@dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between.

    A wavelength is long above original_max_position / low_freq_factor and short below
    original_max_position / high_freq_factor.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        _check("factor", self.factor, 0, above=True)
        _check("low_freq_factor", self.low_freq_factor, 0, above=True)
        _check("high_freq_factor", self.high_freq_factor, self.low_freq_factor, above=True)
        _check("original_max_position", self.original_max_position, 1)


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (arXiv 2309.00071): fast dimensions keep their frequency, slow ones are divided.

    Pairs that turn more than `beta_fast` times over the original context are kept, those that turn
    less than `beta_slow` times divided by `factor`; between them there is a ramp.

    `attention_factor` scales cosines and sines. None: 0.1 ln(factor) + 1, or with `mscale` and
    `mscale_all_dim` (both or neither) the quotient of (0.1 m ln(factor) + 1) of the two. `truncate`
    rounds the ramp's ends to whole dimensions, as the paper's code does.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check("factor", self.factor, 0, above=True)
        _check("original_max_position", self.original_max_position, 1)
        _check("beta_slow", self.beta_slow, 0, above=True)
        _check("beta_fast", self.beta_fast, self.beta_slow)
        if self.attention_factor is not None:
            _check("attention_factor", self.attention_factor, 0, above=True)
        for name in ("mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), 0)
        if not isinstance(self.truncate, bool):
            raise ArgumentError(f"truncate={self.truncate!r}: pass True or False")

    @property
    def resolved_attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * log(self.factor) + 1.0


Scaling = Linear | Llama3 | Yarn


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary embedding of a model.

    Of a head's dimensions the first `rotary_dim` turn: pair i at position p by the angle
    p * inv_freq[i], unscaled theta ** (-2 i / rotary_dim).

    Args:
        rotary_dim: even; below head_dim the rest of a head passes through.
        theta: base of the frequencies.
        interleaved: pair i is dimensions (2i, 2i + 1), as in GPT-J; else (i, i + rotary_dim / 2),
            as in GPT-NeoX, Llama and Qwen.
        scaling: `Linear`, `Llama3`, `Yarn`, or None.

    Raises:
        ArgumentError: a number out of range.

    Source: RoFormer (arXiv 2104.09864) section 3.4.2.

    Example:
        >>> rope = Rope(128, theta=500_000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192))
        >>> rope.table(4096).shape
        torch.Size([4096, 128])
    """

    rotary_dim: int
    theta: float = 10_000.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rotary_dim, bool) or not isinstance(self.rotary_dim, int):
            raise ArgumentError(
                f"rotary_dim={shown(self.rotary_dim)} is no whole number: pass an int"
            )
        if not 2 <= self.rotary_dim <= MAX_DIM or self.rotary_dim % 2:
            raise ArgumentError(
                f"rotary_dim={shown(self.rotary_dim)}: it must be even, at least 2 and at most "
                f"{MAX_DIM}, as dimensions turn in pairs"
            )
        _check("theta", self.theta, 1, above=True)
        if self.scaling is not None and not isinstance(self.scaling, (Linear, Llama3, Yarn)):
            raise ArgumentError(
                f"scaling is {type(self.scaling).__name__}: pass a Linear, Llama3 or Yarn, or None"
            )

    @classmethod
    def from_config(cls, config: Any, *, interleaved: bool = False) -> Rope:
        """The rotary embedding that a transformers-style model config describes.

        Args:
            config: an object or a mapping with `head_dim` (or `hidden_size` and
                `num_attention_heads`), `rope_theta`, `partial_rotary_factor`, and `rope_scaling`
                (or `rope_parameters`) of rope_type default, linear, llama3 or yarn; dynamic is
                read as transformers runs it up to `max_position_embeddings`, unscaled.
            interleaved: configs do not say it.

        Raises:
            ArgumentError: something is missing, or a rope_type that is not there.
        """
        return _from_config(config, interleaved)

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by: YaRN's, else 1."""
        return self.scaling.resolved_attention_factor if isinstance(self.scaling, Yarn) else 1.0

    @property
    def inv_freq(self) -> Tensor:
        """[rotary_dim / 2] fp32: radians a position."""
        return self._frequencies().float()

    def table(
        self,
        max_position: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """[max_position, rotary_dim]: cosines of all pairs, then sines, times the attention factor.

        It is what `smkern.qk_norm_rope_append` takes as `cos_sin`.

        Args:
            max_position: positions 0 to max_position - 1.
            device: where it shall lie; None: torch's default.
            dtype: computed in fp64 and rounded once to this; None: fp32.

        Raises:
            ArgumentError: `max_position` below 1.
        """
        max_position = as_int("max_position", max_position, 1)
        import torch

        dtype = torch.float32 if dtype is None else dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ArgumentError(f"dtype={shown(dtype)}: pass a floating dtype of torch, or None")
        half = self.rotary_dim // 2
        frequencies = self._frequencies()
        try:
            table = torch.empty(max_position, self.rotary_dim, dtype=dtype)
        except RuntimeError:
            raise ArgumentError(
                f"max_position={max_position}: there is no memory for a table of "
                f"{max_position * self.rotary_dim} elements; lower max_position, or max_context"
            ) from None
        for begin in range(0, max_position, MAX_TABLE_STEP):
            end = min(begin + MAX_TABLE_STEP, max_position)
            angles = torch.arange(begin, end, dtype=torch.float64)[:, None] * frequencies
            table[begin:end, :half] = (angles.cos() * self.attention_factor).to(dtype)
            table[begin:end, half:] = (angles.sin() * self.attention_factor).to(dtype)
        return table.to(torch.get_default_device() if device is None else torch_device(device))

    def _frequencies(self) -> Tensor:
        """[rotary_dim / 2] fp64 on the CPU."""
        import torch

        steps = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu")
        plain = self.theta ** (-steps / self.rotary_dim)
        if isinstance(self.scaling, Linear):
            return plain / self.scaling.factor
        if isinstance(self.scaling, Llama3):
            return _llama3(plain, self.scaling)
        if isinstance(self.scaling, Yarn):
            return _yarn(plain, self.scaling, self.rotary_dim, self.theta)
        return plain


def _llama3(plain: Tensor, s: Llama3) -> Tensor:
    turns = s.original_max_position * plain / (2 * pi)
    kept = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / s.factor + kept * plain


def _yarn(plain: Tensor, s: Yarn, rotary_dim: int, theta: float) -> Tensor:
    import torch

    def dimension(turns: float) -> float:
        """Where a pair makes so many turns over the original context."""
        most = s.original_max_position / max(turns * 2 * pi, 1e-280)  # finite however few turns
        return rotary_dim * log(most) / (2 * log(theta))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # no division by zero; the ramp is a step
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu")
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / s.factor * ramp + plain * (1 - ramp)


def _from_config(config: Any, interleaved: bool) -> Rope:
    def get(name: str, default: Any = None) -> Any:
        is_mapping = isinstance(config, Mapping)
        found = config.get(name) if is_mapping else getattr(config, name, None)
        return default if found is None else found

    parameters = get("rope_scaling") or get("rope_parameters") or {}  # as transformers prefers them
    if not isinstance(parameters, Mapping):
        raise ArgumentError(f"{shown(parameters)} as parameters of RoPE: give a dictionary")
    head_dim = get("head_dim")
    if head_dim is None:
        hidden, heads = get("hidden_size"), get("num_attention_heads")
        if hidden is None or heads is None:
            raise ArgumentError(
                "the config has no head_dim, nor hidden_size and num_attention_heads: add head_dim"
            )
        head_dim = hidden // heads
    partial = parameters.get("partial_rotary_factor") or get("partial_rotary_factor", 1.0)
    theta = parameters.get("rope_theta") or get("rope_theta", 10_000.0)
    original = get("original_max_position_embeddings")
    if original is not None:
        parameters = {**parameters, "original_max_position_embeddings": original}
    scaling = _scaling(parameters, get("max_position_embeddings"))
    return Rope(int(head_dim * partial), float(theta), interleaved, scaling)


def _scaling(parameters: Mapping[str, Any], max_position: int | None) -> Scaling | None:
    """The scaling that a `rope_scaling` dictionary describes."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"

    def need(name: str, default: Any = None) -> Any:
        value = parameters.get(name)
        if value is None and default is None:
            raise ArgumentError(f"rope_scaling of type {kind!r} has no {name}: add it")
        return default if value is None else value

    if kind == "default":
        return None
    if kind == "dynamic":  # scales by what lies beyond max_position_embeddings; up to it nothing
        _check("factor", need("factor"), 0, above=True)
        return None
    if kind == "linear":
        return Linear(need("factor"))
    if kind == "llama3":
        original = need("original_max_position_embeddings", max_position)
        return Llama3(need("factor"), need("low_freq_factor"), need("high_freq_factor"), original)
    if kind == "yarn":
        original = need("original_max_position_embeddings", max_position)
        stretched = None if max_position is None else max_position / original
        return Yarn(
            factor=need("factor", stretched),
            original_max_position=original,
            beta_fast=need("beta_fast", 32.0),
            beta_slow=need("beta_slow", 1.0),
            attention_factor=parameters.get("attention_factor"),
            mscale=parameters.get("mscale"),
            mscale_all_dim=parameters.get("mscale_all_dim"),
            truncate=parameters.get("truncate", True) or False,  # null is no
        )
    raise ArgumentError(
        f"rope_type {kind!r} is not there: use default, dynamic, linear, llama3 or yarn, or make a "
        "table of cosines and sines [max_position, rotary_dim] of your own"
    )
