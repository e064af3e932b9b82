"""What a call of an append operator was given, and what must hold of it before anything runs.

All here follows from sizes, strides, dtypes, devices and numbers, so it is checked once for each
combination. Addresses are looked at in every call (`aliasing.py`), the device's memory on demand
(`check.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.checks import FP8, writable
from smkern.tuning.append import VECTOR, AppendProblem

_CACHE = "[pages, page_size, kv_heads, head_dim]"
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8"}
_ON_DEVICE = ("k", "v", "v_cache", "page_table", "kv_lens", "cos_sin", "q_norm", "k_norm",
              "positions", "page_indptr", "cu_q_lens", "out")  # fmt: skip


class Call(NamedTuple):
    """The arguments of a call as they came; `append_kv` has no q and leaves options at None."""

    q: Any
    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    page_table: Any
    kv_lens: Any
    cos_sin: Any = None
    interleaved: Any = False
    q_norm: Any = None
    k_norm: Any = None
    eps: Any = 1e-6
    positions: Any = None
    page_indptr: Any = None
    cu_q_lens: Any = None
    k_scale: Any = None
    v_scale: Any = None
    out: Any = None
    check: Any = False
    num_sms: Any = None

    @property
    def plain(self) -> bool:
        """Whether K and V are appended as they are."""
        return self.q is None


def check_call(call: Call) -> int:
    """Check all of a call but `num_sms`, addresses and what lies on the device.

    Returns:
        The batch.

    Raises:
        ArgumentError: naming the argument, its value, what is wanted and what to do.
    """
    _check_rows(call)
    batch = checks.check_lengths(call.kv_lens, call.cu_q_lens)
    if call.cu_q_lens is None and call.k.shape[0] != batch:
        raise ArgumentError(
            f"k has {call.k.shape[0]} tokens for {batch} requests: without cu_q_lens each request "
            "has one; pass cu_q_lens"
        )
    checks.check_table(call.page_table, call.page_indptr, batch)
    _check_caches(call)
    if not call.plain:
        _check_options(call)
        if call.out is not None:
            checks.check_out(call.out, call.q)
    for name in ("k_scale", "v_scale"):
        value = getattr(call, name)
        checks.check_scale(name, value, call.k_cache, owner=("k_cache", call.k_cache))
    for name in _ON_DEVICE:
        x = getattr(call, name)
        if isinstance(x, Tensor):
            checks.check_device(name, x, call.k_cache.device, "k_cache")
    return batch


def problem_of(call: Call, batch: int, *, aligned: bool) -> AppendProblem:
    """What chooses a kernel for a checked call.

    Raises:
        ArgumentError: fp32 tensors, which only the reference takes.
    """
    if call.k.dtype is torch.float32:
        raise ArgumentError("k is torch.float32 on a GPU: use torch.bfloat16 or torch.float16")
    options: dict[str, Any] = {}
    if call.cos_sin is not None:
        options["rotary_dim"] = call.cos_sin.shape[1]
        options["table_dtype"] = _NAMES[call.cos_sin.dtype]
        options["interleaved"] = bool(call.interleaved)
    if call.q_norm is not None:
        options |= {"norm": True, "weight_dtype": _NAMES[call.q_norm.dtype]}
    tokens, kv_heads, head_dim = call.k.shape
    dtype: Any = _NAMES[call.k.dtype]
    cache: Any = _NAMES[call.k_cache.dtype]
    return AppendProblem(
        tokens, batch, 0 if call.plain else call.q.shape[1], kv_heads, head_dim,
        call.k_cache.shape[1], dtype, cache, ragged=call.cu_q_lens is not None,
        flat=call.page_indptr is not None, aligned=aligned, **options,
    )  # fmt: skip


def is_aligned(call: Call) -> bool:
    """Whether all rows begin at whole 16 bytes, those of an fp8 cache at whole 8."""
    bases = [call.k, call.v, call.k_cache, call.v_cache]
    bases += [x for x in (call.q, call.out) if x is not None]
    weights = [x for x in (call.cos_sin, call.q_norm, call.k_norm) if x is not None]
    table = call.cos_sin
    return not (
        any(x.data_ptr() % 16 for x in (*bases, *weights))
        or any(stride % VECTOR for x in bases for stride in x.stride()[:-1])
        or (table is not None and table.stride(0) * table.element_size() % 16)
    )


def _check_rows(call: Call) -> None:
    rows = (("k", call.k), ("v", call.v)) + (() if call.plain else (("q", call.q),))
    for name, x in rows:
        kind = "q_heads" if name == "q" else "kv_heads"
        checks.check_tensor(name, x, 3, f"[tokens, {kind}, head_dim]")
        checks.check_inner(name, x)
    k = call.k
    if k.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(
            f"k is {k.dtype}: use torch.bfloat16 or torch.float16 (torch.float32 on CPU tensors)"
        )
    for name, x in rows[1:]:
        if x.dtype is not k.dtype:
            raise ArgumentError(f"{name} is {x.dtype}, k is {k.dtype}: convert {name}")
        if (x.shape[0], x.shape[2]) != (k.shape[0], k.shape[2]):
            raise ArgumentError(
                f"{name} has shape {list(x.shape)}, k {list(k.shape)}: tokens and head_dim must "
                "agree"
            )
    if call.v.shape != k.shape:
        raise ArgumentError(
            f"v has shape {list(call.v.shape)}, k {list(k.shape)}: they must be of one shape"
        )
    heads = k.shape[1] if call.plain else call.q.shape[1]
    checks.check_head_counts(heads, k.shape[1], k.shape[2])
    if k.shape[0] * max(heads, 1) > checks.MAX_SIZE:
        raise ArgumentError(
            f"{k.shape[0]} tokens of {heads} heads are more than {checks.MAX_SIZE} rows: split "
            "the step"
        )


def _check_caches(call: Call) -> None:
    k, k_cache, v_cache = call.k, call.k_cache, call.v_cache
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.check_tensor(name, x, 4, _CACHE)
        checks.check_inner(name, x)
        if x.dtype not in (k.dtype, FP8):
            raise ArgumentError(
                f"{name} is {x.dtype}, k is {k.dtype}: a cache has k's dtype or {FP8}; convert one"
            )
        if not writable(x):
            raise ArgumentError(
                f"{name} has strides {x.stride()} for shape {list(x.shape)}: two of its elements "
                "share an address; pass a cache whose pages, slots and heads lie apart"
            )
    checks.check_pair(k_cache, v_cache)
    if k_cache.shape[2:] != k.shape[1:]:
        raise ArgumentError(
            f"k has {k.shape[1]} heads of {k.shape[2]}, the caches {k_cache.shape[2]} of "
            f"{k_cache.shape[3]}: they must agree"
        )
    checks.check_page_size(k_cache.shape[1])


def _check_options(call: Call) -> None:
    dim, dtype = call.k.shape[2], call.k.dtype
    if (call.q_norm is None) != (call.k_norm is None):
        given, absent = ("q_norm", "k_norm") if call.k_norm is None else ("k_norm", "q_norm")
        raise ArgumentError(f"{given} is given without {absent}: pass both, or neither")
    if call.q_norm is not None:
        for name in ("q_norm", "k_norm"):
            checks.check_tensor(name, getattr(call, name), 1, "[head_dim]")
            checks.check_vector(name, getattr(call, name), dim, call.q_norm.dtype, "[head_dim]")
        if call.q_norm.dtype not in (dtype, torch.float32):
            raise ArgumentError(
                f"q_norm is {call.q_norm.dtype}, k is {dtype}: weights have k's dtype or "
                "torch.float32; convert them"
            )
        if checks.as_float("eps", call.eps) < 0:
            raise ArgumentError(f"eps={call.eps!r}: pass a number of at least 0")
    if call.cos_sin is not None:
        _check_cos_sin(call.cos_sin, dim, dtype)
    elif call.positions is not None:
        raise ArgumentError(
            "positions are given without cos_sin: they are RoPE's alone (where K and V go follows "
            "from kv_lens); pass cos_sin, or leave them at None"
        )
    if call.positions is not None:
        positions = call.positions
        checks.check_tensor("positions", positions, 1, "[tokens]")
        kind = positions.dtype if positions.dtype is torch.int64 else torch.int32
        checks.check_vector("positions", positions, call.k.shape[0], kind, "[tokens]")


def _check_cos_sin(table: Any, dim: int, dtype: torch.dtype) -> None:
    checks.check_tensor("cos_sin", table, 2, "[max_position, rotary_dim]")
    checks.check_inner("cos_sin", table)
    if table.dtype not in (torch.float32, dtype):
        raise ArgumentError(
            f"cos_sin is {table.dtype}, k is {dtype}: it has k's dtype or torch.float32; make it "
            "by Rope.table"
        )
    if table.shape[0] < 1 or not 2 <= table.shape[1] <= dim or table.shape[1] % 2:
        raise ArgumentError(
            f"cos_sin has shape {list(table.shape)}: wanted [max_position, rotary_dim] with at "
            f"least one position and an even rotary_dim of 2 to head_dim {dim}"
        )
