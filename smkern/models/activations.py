"""Activation buffers: allocated once for the largest forward, written by every operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.errors import ArgumentError
from smkern.limits import FP8_BLOCK
from smkern.models.config import ModelConfig
from smkern.models.layers import FP8


@dataclass(frozen=True, slots=True, eq=False)
class MoeBuffers:
    """What a mixture of experts writes in a layer; a slot is one of a token's experts.

    Attributes:
        router_logits: [tokens, num_experts].
        weights: [tokens, top_k] fp32.
        experts: [tokens, top_k] int32.
        rows: [tokens * top_k, hidden_size], sorted by expert.
        offsets: [num_experts + 1] int32: where each expert's rows begin.
        index: [tokens * top_k] int32: the row of each slot.
        gated: [tokens * top_k, I].
        outs: [tokens * top_k, hidden_size].
    """

    router_logits: Tensor
    weights: Tensor
    experts: Tensor
    rows: Tensor
    offsets: Tensor
    index: Tensor
    gated: Tensor
    outs: Tensor


class QuantizedRows(NamedTuple):
    """Rows in e4m3 and their scales, as a product reads them.

    Attributes:
        values: [rows, columns] float8_e4m3fn.
        scale: fp32: [rows, columns / 128], or a scale a row, [rows].
    """

    values: Tensor
    scale: Tensor


class QuantizedBuffers(NamedTuple):
    """The inputs of a quantized model's products, None of another's.

    Attributes:
        hidden, attended: By token.
        gated: By token; of experts by slot.
        rows: By slot, of experts.
        gate_up: [tokens, 2 * intermediate_size] in the model's dtype, where `gated` follows from it
            in one pass: of a dense MLP with dynamic scales.
    """

    hidden: QuantizedRows | None = None
    attended: QuantizedRows | None = None
    gated: QuantizedRows | None = None
    rows: QuantizedRows | None = None
    gate_up: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StepBuffers:
    """Views of activation buffers for one step.

    Attributes:
        hidden: [tokens, hidden_size], the residual stream; layers update it in place.
        normed: [tokens, hidden_size].
        qkv: [tokens, qkv_size]; `q`, `k` and `v` are its heads, [tokens, heads, head_dim].
        attended: [tokens, q_heads, head_dim], what attention writes; `attended_rows` the same as a
            matrix. In e4m3 where `fp8.attended` is it, which takes no pass of its own.
        gated: [tokens, intermediate_size] of a dense MLP, else None; None too with
            `fp8.gate_up`.
        moe: Buffers of a mixture of experts, else None.
        fp8: Inputs of a quantized model's products.
        last_rows: [batch] int32: the row of each request's last token.
        last: [batch, hidden_size]: those rows.
        last_attended: [batch, q_size]: those rows of what attention wrote.
        last_attended_scale: Their scales; None of another model than one that attends in e4m3.
        last_normed: [batch, hidden_size].
        logits: [batch, vocab_size].
    """

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attended: Tensor
    attended_rows: Tensor
    gated: Tensor | None
    moe: MoeBuffers | None
    fp8: QuantizedBuffers
    last_rows: Tensor
    last: Tensor
    last_attended: Tensor
    last_attended_scale: Tensor | None
    last_normed: Tensor
    logits: Tensor

    def rows(self, of: slice) -> StepBuffers:
        """Some tokens' rows of what is written behind attention, without a mixture of experts."""

        def rows_of(x: Any) -> Any:
            if isinstance(x, QuantizedRows):
                return QuantizedRows(x.values[of], x.scale[of])
            return None if x is None else x[of]

        names = ("hidden", "normed", "attended_rows", "gated")
        fp8 = QuantizedBuffers(*map(rows_of, self.fp8))
        return replace(self, fp8=fp8, **{name: rows_of(getattr(self, name)) for name in names})


class ActivationBuffers:
    """Activations of a decoder, for steps of at most so many tokens and requests.

    Steps that may run at the same time need buffers of their own.

    Args:
        config: The model.
        max_tokens: Tokens of the largest step.
        max_batch: Requests of the largest step. None: `max_tokens`.
        device: Where the memory lies.

    Raises:
        ArgumentError: a count below 1.

    Example:
        >>> from smkern.models import ActivationBuffers, preset
        >>> activations = ActivationBuffers(preset("qwen3-8b"), max_tokens=4, device="cpu")
        >>> activations.buffers(3, 2).qkv.shape
        torch.Size([3, 6144])
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        max_batch: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        batch = max_tokens if max_batch is None else max_batch
        if max_tokens < 1 or batch < 1:
            raise ArgumentError(
                f"max_tokens={max_tokens}, max_batch={batch}: give at least 1 of each"
            )
        self.config = config
        self.max_tokens = max_tokens
        self.max_batch = batch
        self._fields = _fields(config)
        counts, place = _counts(config, max_tokens, batch), torch_device(device)
        # Rows of padding are computed and belong to nobody: they must be numbers.
        self._whole = {
            name: torch.zeros(counts[field.rows], *field.row, dtype=field.dtype, device=place)
            for name, field in self._fields.items()
        }
        self.device = self._whole["hidden"].device  # with its index, as tensors say it

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self._whole.values())

    def buffers(self, num_tokens: int, batch: int) -> StepBuffers:
        """Views for a step of so many tokens and requests.

        Raises:
            ArgumentError: more than the buffers hold.
        """
        if not 0 <= num_tokens <= self.max_tokens or not 0 <= batch <= self.max_batch:
            raise ArgumentError(
                f"a step of {num_tokens} tokens and {batch} requests in buffers for "
                f"{self.max_tokens} and {self.max_batch}: split the step, or make larger buffers"
            )
        config, counts = self.config, _counts(self.config, num_tokens, batch)
        x = {name: whole[: counts[self._fields[name].rows]] for name, whole in self._whole.items()}
        heads = [config.num_q_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = x["qkv"].view(num_tokens, sum(heads), config.head_dim).split(heads, 1)
        moe = None
        rows = x["attended"].view(num_tokens, config.q_size)
        if rows.dtype is FP8:
            x["attended_fp8"] = rows
        inputs = {
            name: QuantizedRows(x.pop(f"{name}_fp8"), x.pop(f"{name}_scale"))
            for name in _quantized_widths(config)
        }
        if config.moe is not None:
            moe = MoeBuffers(**{name: x.pop(name) for name in MoeBuffers.__dataclass_fields__})
        return StepBuffers(
            q=q,
            k=k,
            v=v,
            attended_rows=rows,
            gated=x.pop("gated", None),
            moe=moe,
            fp8=QuantizedBuffers(**inputs, gate_up=x.pop("gate_up", None)),
            last_attended_scale=x.pop("last_attended_scale", None),
            **x,
        )


_Rows = Literal["token", "slot", "expert", "request"]


class _Field(NamedTuple):
    """A buffer: what it has a row for, the row's shape, and its dtype."""

    rows: _Rows
    row: tuple[int, ...]
    dtype: torch.dtype


def _fields(config: ModelConfig) -> dict[str, _Field]:
    hidden, dtype, moe = (config.hidden_size,), config.dtype, config.moe
    found = {
        "hidden": _Field("token", hidden, dtype),
        "normed": _Field("token", hidden, dtype),
        "qkv": _Field("token", (config.qkv_size,), dtype),
        "attended": _Field("token", (config.num_q_heads, config.head_dim), dtype),
        "last_rows": _Field("request", (), torch.int32),
        "last": _Field("request", hidden, dtype),
        "last_attended": _Field("request", (config.q_size,), dtype),
        "last_normed": _Field("request", hidden, dtype),
        "logits": _Field("request", (config.vocab_size,), dtype),
    }
    for name, (rows, width) in _quantized_widths(config).items():
        assert config.quantization is not None
        blocks = (width // FP8_BLOCK,) if config.quantization.kind == "fp8-block" else ()
        found[f"{name}_fp8"] = _Field(rows, (width,), FP8)
        found[f"{name}_scale"] = _Field(rows, blocks, torch.float32)
    if config.attends_in_e4m3:
        for name in ("attended", "last_attended"):
            found[name] = found[name]._replace(dtype=FP8)
        found["last_attended_scale"] = found["attended_scale"]._replace(rows="request")
        del found["attended_fp8"]
    if moe is None:
        given, width = config.quantization, config.intermediate_size
        if given is not None and given.activations == "dynamic":
            return {**found, "gate_up": _Field("token", (2 * width,), dtype)}
        return {**found, "gated": _Field("token", (width,), dtype)}
    return {
        **found,
        "router_logits": _Field("token", (moe.num_experts,), dtype),
        "weights": _Field("token", (moe.top_k,), torch.float32),
        "experts": _Field("token", (moe.top_k,), torch.int32),
        "rows": _Field("slot", hidden, dtype),
        "offsets": _Field("expert", (), torch.int32),
        "index": _Field("slot", (), torch.int32),
        "gated": _Field("slot", (moe.intermediate_size,), dtype),
        "outs": _Field("slot", hidden, dtype),
    }


def _quantized_widths(config: ModelConfig) -> dict[str, tuple[_Rows, int]]:
    """What a quantized model's products read: what has a row, and its columns."""
    if config.quantization is None:
        return {}
    found: dict[str, tuple[_Rows, int]] = {
        "hidden": ("token", config.hidden_size),
        "attended": ("token", config.q_size),
    }
    if config.moe is None:
        return {**found, "gated": ("token", config.intermediate_size)}
    width = config.moe.intermediate_size
    return {**found, "gated": ("slot", width), "rows": ("slot", config.hidden_size)}


def _counts(config: ModelConfig, tokens: int, batch: int) -> dict[_Rows, int]:
    counts: dict[_Rows, int] = {"token": tokens, "request": batch}
    if config.moe is not None:
        counts["slot"] = tokens * config.moe.top_k
        counts["expert"] = config.moe.num_experts + 1
    return counts
