"""What a call of an append operator was given, and what must hold of it before anything runs.

All here follows from sizes, strides, dtypes, devices and numbers; the device's memory is looked at
on demand (`check.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.kernels.append_launch import first_step
from smkern.ops import checks
from smkern.ops.checks import NAMES
from smkern.tuning.append import VECTOR, AppendProblem

VECTORS = ("q", "k", "v", "k_cache", "v_cache", "cos_sin", "q_norm", "k_norm", "out")
"""What begins at whole 16 bytes where a kernel moves vectors."""


class Call(NamedTuple):
    """The arguments of a call as they came; `append_kv` has no q and leaves options at None."""

    q: Any = None
    k: Any = None
    v: Any = None
    k_cache: Any = None
    v_cache: Any = None
    page_table: Any = None
    kv_lens: Any = None
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


def check_append(call: Call) -> None:
    """Raise ArgumentError for a call of `qk_norm_rope_append` that cannot be served."""
    if call.q is None:
        raise ArgumentError("q is None: pass a tensor, or use smkern.append_kv")
    check_call(call)


def check_call(call: Call) -> None:
    """Raise ArgumentError for a call of either operator that cannot be served."""
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
    for name in ("k_scale", "v_scale"):
        checks.check_scale(name, getattr(call, name), call.k_cache)


def problem_of(call: Call, aligned: bool) -> AppendProblem | None:
    """What chooses a kernel for a checked call; None where nothing is appended.

    Args:
        call: A checked call of either operator.
        aligned: Whether q, k, v, out, caches, table and weights begin at whole 16 bytes.

    Raises:
        ArgumentError: fp32 tensors, which only the reference takes.
    """
    if call.k.dtype is torch.float32:
        raise ArgumentError("k is torch.float32 on a GPU: use torch.bfloat16 or torch.float16")
    tokens, kv_heads, head_dim = call.k.shape
    batch = call.kv_lens.shape[0]
    if not (tokens and batch):
        return None
    options: dict[str, Any] = {}
    if call.cos_sin is not None:
        options["rotary_dim"] = call.cos_sin.shape[1]
        options["table_dtype"] = NAMES[call.cos_sin.dtype]
        options["interleaved"] = bool(call.interleaved)
    if call.q_norm is not None:
        options |= {"norm": True, "weight_dtype": NAMES[call.q_norm.dtype]}
    return AppendProblem(
        tokens, batch, 0 if call.plain else call.q.shape[1], kv_heads, head_dim,
        call.k_cache.shape[1], NAMES[call.k.dtype], NAMES[call.k_cache.dtype],
        ragged=call.cu_q_lens is not None, flat=call.page_indptr is not None,
        aligned=aligned and _steps_are_whole(call), **options,
    )  # fmt: skip


def _steps_are_whole(call: Call) -> bool:
    """Whether rows are whole 16 bytes apart, those of an fp8 cache whole 8."""
    table = call.cos_sin
    rows = (call.q, call.out, call.k, call.v, call.k_cache, call.v_cache)
    return not (
        any(stride % VECTOR for x in rows if x is not None for stride in x.stride()[:-1])
        or (table is not None and table.stride(0) * table.element_size() % 16)
    )


def numbers_of(call: Call) -> tuple[Any, ...]:
    """What a launch takes behind the addresses (`STRIDES`, `NUMBERS`, `SCALARS` of its kernel).

    Strides count in the elements of 16 bytes where all is aligned; with a q there is an `out`.
    """
    k, v, table, cos_sin = call.k, call.v, call.page_table, call.cos_sin
    vectors = (getattr(call, name) for name in VECTORS)
    whole = not any(x.data_ptr() % 16 for x in vectors if x is not None) and _steps_are_whole(call)
    q_strides, out_strides = ((0, 0) if x is None else x.stride()[:2] for x in (call.q, call.out))
    rows = (
        *q_strides, *k.stride()[:2], *v.stride()[:2], *out_strides, *call.k_cache.stride()[:3],
        *call.v_cache.stride()[:3],
    )  # fmt: skip
    cos_stride, most, step = 0, 1, 0
    if cos_sin is not None:
        cos_stride = cos_sin.stride(0) // (16 // cos_sin.element_size() if whole else 1)
        most = cos_sin.shape[0]
    if call.positions is not None:
        step = call.positions.element_size() // 4
    scales = (call.k_scale, call.v_scale)
    on_device = [isinstance(x, Tensor) for x in scales]
    factors = (
        1.0 if there or x is None else float(x) for x, there in zip(scales, on_device, strict=True)
    )
    batch = call.kv_lens.shape[0]
    return (
        *(stride // (VECTOR if whole else 1) for stride in rows),
        0 if call.page_indptr is not None else table.stride(0), cos_stride, k.shape[0], batch,
        first_step(batch), table.shape[-1], call.k_cache.shape[0], most, step, *on_device,
        float(call.eps), *factors,
    )  # fmt: skip


def _check_rows(call: Call) -> None:
    rows = (("k", call.k), ("v", call.v)) + (() if call.plain else (("q", call.q),))
    for name, x in rows:
        kind = "q_heads" if name == "q" else "kv_heads"
        checks.check_tensor(name, x, 3, f"[tokens, {kind}, head_dim]")
        checks.check_inner(name, x)
    k = call.k
    checks.check_float("k", k)
    for name, x in rows[1:]:
        checks.check_same(name, x, "k", k)
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
    checks.check_caches(k_cache, v_cache, "k", k)
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
