"""What a `paged_attention` call was given, and what must hold of it before anything runs.

All here follows from sizes, strides, dtypes, devices and numbers, so it is checked once for each
combination. The device's memory is looked at on demand (`check.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.attention.plan import Plan, check_plan_device, differences
from smkern.ops.checks import FP8, FP8_BLOCK
from smkern.ops.fp8.scales import check_block_scale
from smkern.ops.operator import Shapes
from smkern.tuning.attention.constraints import AVAILABLE, writes_e4m3
from smkern.tuning.attention.shapes import AttentionProblem, AttentionShape

BACKENDS = (*AVAILABLE, "model")
"""`backend=` choices: one kernel; "model" (no tuned table)."""


class Call(NamedTuple):
    """The arguments of a call as they came; a named tuple, as it is made in every call."""

    q: Any
    k_cache: Any
    v_cache: Any
    page_table: Any
    kv_lens: Any
    page_indptr: Any
    cu_q_lens: Any
    max_q_len: Any
    causal: Any
    scale: Any
    window: Any
    softcap: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    out_scale: Any
    plan: Any
    out: Any
    lse: Any
    return_lse: Any
    check: Any
    backend: Any
    num_sms: Any


def check_call(call: Call) -> None:
    """Raise ArgumentError for a call that cannot be served.

    All is checked but `num_sms`, addresses and what lies on the device.
    """
    checks.check_choice("backend", call.backend, BACKENDS)
    _check_q_and_caches(call.q, call.k_cache, call.v_cache)
    batch = checks.check_lengths(call.kv_lens, call.cu_q_lens)
    checks.check_requests(batch)
    checks.check_table(call.page_table, call.page_indptr, batch)
    pages, columns = call.k_cache.shape[0], call.page_table.shape[-1]
    if batch and not (pages and columns):
        raise ArgumentError(
            f"page_table is {list(call.page_table.shape)} and the cache has {pages} pages: a batch "
            "needs at least one of each, even where all lengths are 0"
        )
    _check_options(call)
    if call.lse is not None:
        checks.check_sums("lse", call.lse, call.q.shape[:2], "[tokens, q_heads]")
    if call.out_scale is not None:
        check_out_scale(call.out_scale, call.q, call.k_cache.shape[2])
    if call.plan is not None:
        _check_plan(call.plan, _shape(call), call.q)
    else:
        _shape(call)


def results_of(call: Call) -> Shapes:
    """Shape and dtype of out, and of lse where somebody asked for it."""
    q = call.q
    lse = (tuple(q.shape[:2]), torch.float32) if call.return_lse else None
    return (tuple(q.shape), q.dtype if call.out_scale is None else FP8), lse


def shape_of(call: Call) -> AttentionShape:
    """The shape of a checked call's step: the plan's, or one made from the table's size."""
    shape: AttentionShape = _shape(call) if call.plan is None else call.plan.shape
    return shape


def problem_of(call: Call, aligned: bool) -> AttentionProblem:
    """What chooses a kernel for a checked call.

    Raises:
        ArgumentError: fp32 queries, which only the reference takes.
    """
    softcap, sinks, scaled = (x is not None for x in (call.softcap, call.sinks, call.out_scale))
    return problem_from(shape_of(call), call.q.dtype, call.k_cache.dtype, softcap, sinks, scaled)


def sizes_of(call: Call) -> tuple[Any, ...]:
    """`AttentionArguments.sizes` of a checked call."""
    q, k, v, table = call.q, call.k_cache, call.v_cache, call.page_table
    tokens, heads, dim = q.shape
    out = (heads * dim, dim) if call.out is None else _strides(call.out)
    k_scale, v_scale = (
        1.0 if x is None or isinstance(x, Tensor) else float(x)
        for x in (call.k_scale, call.v_scale)
    )
    return (
        _strides(q), out, _strides(k), _strides(v),
        0 if call.page_indptr is not None else table.stride(0), table.shape[-1], k.shape[0],
        tokens, dim**-0.5 if call.scale is None else float(call.scale),
        0.0 if call.softcap is None else float(call.softcap), k_scale, v_scale,
        (0, 0) if call.out_scale is None else tuple(call.out_scale.stride()),
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides but the inner one; dense ones where nothing is stepped over: torch leaves any."""
    found, dense = [], x.shape[-1]
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        found.append(stride if size > 1 else dense)
        dense = found[-1] * max(size, 1)
    return tuple(reversed(found))


def problem_from(
    shape: AttentionShape,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    softcap: bool,
    sinks: bool,
    scaled: bool = False,
) -> AttentionProblem:
    """What chooses a kernel for a step of these dtypes and options.

    Raises:
        ArgumentError: dtypes that no kernel takes.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        raise ArgumentError(f"q is {dtype} on a GPU: use torch.bfloat16 or torch.float16")
    if cache_dtype not in (dtype, FP8):
        raise ArgumentError(
            f"the cache is {cache_dtype}, q {dtype}: a cache has q's dtype or {FP8}; convert one"
        )
    names = checks.NAMES
    return AttentionProblem(shape, names[dtype], names[cache_dtype], softcap, sinks, scaled)


def _check_q_and_caches(q: Any, k_cache: Any, v_cache: Any) -> None:
    checks.check_rows("q", q, 3, "[tokens, q_heads, head_dim]")
    checks.check_caches(k_cache, v_cache, "q", q)
    if q.shape[2] != k_cache.shape[3]:
        raise ArgumentError(
            f"q has head_dim {q.shape[2]}, the caches have {k_cache.shape[3]}: they must agree"
        )
    checks.check_head_counts(q.shape[1], k_cache.shape[2], q.shape[2])
    checks.check_page_size(k_cache.shape[1])


def _check_options(call: Call) -> None:
    if call.scale is not None:
        checks.as_float("scale", call.scale, positive=True)
    checks.as_window(call.window)
    if call.softcap is not None:
        checks.as_float("softcap", call.softcap, positive=True)
    if call.sinks is not None:
        checks.check_vector("sinks", call.sinks, call.q.shape[1], torch.float32, "[q_heads]")
    for name in ("k_scale", "v_scale"):
        value, positive = getattr(call, name), name == "k_scale"
        checks.check_scale(name, value, call.k_cache, positive=positive)
    if call.scale is not None and isinstance(call.k_scale, float | int):
        checks.as_float("scale x k_scale", float(call.scale) * call.k_scale, positive=True)


def check_heads_of_scales(num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise ArgumentError for heads whose attention writes no e4m3."""
    if not writes_e4m3(num_q_heads, num_kv_heads, head_dim):
        raise ArgumentError(
            f"out_scale with {num_q_heads} heads of {head_dim} on {num_kv_heads} KV heads: "
            f"{FP8_BLOCK} columns must be of one KV head's queries (head_dim 128 or 256, or 64 "
            "with an even number of them); leave it out, and call smkern.quantize"
        )


def check_out_scale(scale: Any, q: Tensor, num_kv_heads: int) -> None:
    """Raise ArgumentError unless it takes a scale for 128 columns of every token."""
    checks.check_kind("out_scale", scale)
    if scale.dtype is not torch.float32:
        raise ArgumentError(f"out_scale is {scale.dtype}, wanted torch.float32")
    tokens, heads, dim = q.shape
    check_heads_of_scales(heads, num_kv_heads, dim)
    columns = heads * dim // FP8_BLOCK
    if scale.dim() != 2:
        raise ArgumentError(
            f"out_scale has shape {list(scale.shape)}, wanted [{tokens}, {columns}], one for "
            f"{FP8_BLOCK} columns of a token: a scale a token needs all of its heads, so leave it "
            "out, and call smkern.quantize(x, 'token')"
        )
    check_block_scale("out_scale", scale, tokens, heads * dim)


def _shape(call: Call) -> AttentionShape:
    """The shape that a call implies; `max_tokens` is what q holds."""
    batch, tokens, plan = call.kv_lens.shape[0], call.q.shape[0], call.plan
    most = call.max_q_len
    if call.cu_q_lens is None:
        if tokens != batch:
            raise ArgumentError(
                f"q has {tokens} tokens for {batch} requests: without cu_q_lens each request has "
                "one; pass cu_q_lens and max_q_len"
            )
        if most is not None and checks.as_int("max_q_len", most, 1) != 1:
            raise ArgumentError(
                f"max_q_len={most} without cu_q_lens: one query token a request is meant; pass "
                "cu_q_lens, or leave max_q_len at None"
            )
        most = 1
    elif most is None:
        if not isinstance(plan, Plan):
            raise ArgumentError(
                "max_q_len is missing: with cu_q_lens it is needed on the host, as the lengths are "
                "on the device; pass the longest q_len of the batch or a bound of it"
            )
        most = plan.shape.max_q_len
    columns, page_size = call.page_table.shape[-1], call.k_cache.shape[1]
    rows = batch if call.page_indptr is None else 1
    longest = min(columns * page_size, checks.MAX_SIZE)
    return AttentionShape(
        batch=batch,
        num_q_heads=call.q.shape[1],
        num_kv_heads=call.k_cache.shape[2],
        head_dim=call.q.shape[2],
        page_size=page_size,
        max_q_len=checks.as_int("max_q_len", most, 1),
        max_kv_len=longest,
        max_tokens=tokens,
        max_total_kv=min(rows * columns * page_size, batch * longest),
        causal=bool(call.causal),
        window=checks.as_window(call.window),
    )


def _check_plan(plan: Any, shape: AttentionShape, q: Tensor) -> None:
    """Raise ArgumentError unless a plan's numbers are those of this call.

    Its bounds on lengths may be below what the table holds, and above: lengths decide.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError(
            f"plan is {type(plan).__name__}, not a smkern.Plan: pass what plan_attention returned"
        )
    check_plan_device(plan, q.device, "plan")
    theirs = plan.shape
    bounds = ("max_kv_len", "max_total_kv", "max_tokens")
    mine = AttentionShape(
        **{
            name: getattr(theirs if name in bounds else shape, name)
            for name in AttentionShape.__dataclass_fields__
        }
    )
    if mine != theirs:
        raise ArgumentError(
            f"plan is of another step: {differences(theirs, mine)}; plan with this call's numbers"
        )
    if q.shape[0] > theirs.max_tokens:
        raise ArgumentError(
            f"q has {q.shape[0]} tokens, the plan is for at most {theirs.max_tokens}: pass "
            "num_tokens to plan_attention"
        )
