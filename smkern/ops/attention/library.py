"""`smkern::paged_attention` and its `_out` in torch.library: for torch.compile, modes, fakes.

With scales of the output they are `smkern::scaled_paged_attention` and its `_out`.

A plan is no tensor: an operator takes its two buffers and its numbers (`Plan.numbers`). They are
declared as read only, which they are to anyone who looks between launches: counters return to zero
and partial results are read by nobody else. Declared as written, each layer of a compiled model
would copy them. Without them the operator makes a plan of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.attention.call import BACKENDS, Call
from smkern.ops.attention.plan import Plan, plan_from_numbers
from smkern.ops.checks import FP8, check_choice
from smkern.ops.operator_library import NAMESPACE, define

_TENSORS = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens"
_OPTIONS = (
    "Tensor? page_indptr=None, Tensor? cu_q_lens=None, SymInt? max_q_len=None, bool causal=True, "
    "float? scale=None, SymInt? window=None, float? softcap=None, Tensor? sinks=None, "
    "float? k_scale=None, float? v_scale=None, Tensor? k_scale_tensor=None, "
    "Tensor? v_scale_tensor=None, Tensor? plan_buffer=None, Tensor? plan_workspace=None, "
    "SymInt[]? plan_numbers=None, bool check=False, str? backend=None, SymInt? num_sms=None"
)
_RESULTS = "bool return_lse=False) -> (Tensor out, Tensor lse)"
_PLACES = "Tensor(a!) out, *"
_SCALES = "Tensor(c!) out_scale"
SCHEMA = f"paged_attention({_TENSORS}, *, {_OPTIONS}, {_RESULTS}"
OUT_SCHEMA = f"paged_attention_out({_TENSORS}, {_PLACES}, {_OPTIONS}, Tensor(b!)? lse=None) -> ()"
SCALED_SCHEMA = f"scaled_paged_attention({_TENSORS}, {_SCALES}, *, {_OPTIONS}, {_RESULTS}"
SCALED_OUT_SCHEMA = (
    f"scaled_paged_attention_out({_TENSORS}, {_SCALES}, {_PLACES}, {_OPTIONS}, "
    "Tensor(b!)? lse=None) -> ()"
)


def _call(q: Any, k_cache: Any, v_cache: Any, page_table: Any, kv_lens: Any, *, out: Any = None,
          lse: Any = None, return_lse: bool = False, **options: Any) -> Call:  # fmt: skip
    """A call from an operator's arguments."""
    plan = None
    numbers, buffer = options.pop("plan_numbers", None), options.pop("plan_buffer", None)
    workspace = options.pop("plan_workspace", None)
    if buffer is not None and workspace is not None and numbers is not None:
        plan = plan_from_numbers(numbers, buffer, workspace)
    for name in ("k_scale", "v_scale"):
        tensor = options.pop(f"{name}_tensor", None)
        options[name] = options.get(name) if tensor is None else tensor
    defaults = dict.fromkeys(Call._fields) | {"causal": True, "check": False}
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "page_table": page_table,
             "kv_lens": kv_lens, "out": out, "lse": lse, "return_lse": return_lse}  # fmt: skip
    return Call(**(defaults | options | given | {"plan": plan}))


def _options(call: Call) -> dict[str, Any]:
    """An operator's options from a call."""
    same = ("page_indptr", "cu_q_lens", "max_q_len", "causal", "scale", "window", "softcap",
            "sinks", "check", "backend", "num_sms")  # fmt: skip
    options = {name: getattr(call, name) for name in same}
    for name in ("k_scale", "v_scale"):
        value = getattr(call, name)
        options[f"{name}_tensor" if isinstance(value, Tensor) else name] = value
    if call.plan is not None:
        if not isinstance(call.plan, Plan):
            raise ArgumentError(
                f"plan is {type(call.plan).__name__}, not a smkern.Plan: pass what plan_attention "
                "returned"
            )
        options["plan_buffer"] = call.plan.buffer
        options["plan_workspace"] = call.plan.workspace
        options["plan_numbers"] = call.plan.numbers
    return options


def through_library(call: Call) -> tuple[Tensor, Tensor | None]:
    """By torch's dispatcher: under torch.compile, modes and transforms, for tensor subclasses."""
    tensors = [call.q, call.k_cache, call.v_cache, call.page_table, call.kv_lens]
    ops, dtype = torch.ops.smkern, call.q.dtype
    functional, into = ops.paged_attention, ops.paged_attention_out
    if call.out_scale is not None:
        functional, into, dtype = ops.scaled_paged_attention, ops.scaled_paged_attention_out, FP8
        tensors.append(call.out_scale)
    options = _options(call)
    if call.out is None and call.lse is None:
        out, lse = functional(*tensors, **options, return_lse=call.return_lse)
        return out, lse if call.return_lse else None
    out = call.q.new_empty(call.q.shape, dtype=dtype) if call.out is None else call.out
    lse = call.lse
    if lse is None and call.return_lse:
        lse = call.q.new_empty(call.q.shape[:2], dtype=torch.float32)
    into(*tensors, out, **options, lse=lse)
    return out, lse


def _check_fake(q, k_cache, v_cache, page_table, kv_lens, backend, page_indptr, out=None) -> None:
    """Shape rules that symbolic sizes can be held to; the rest is checked when it runs."""
    check_choice("backend", backend, BACKENDS)
    torch._check(q.dim() == 3, lambda: f"q {q.shape} is not [tokens, q_heads, head_dim]")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        torch._check(cache.dim() == 4, lambda name=name: f"{name} must have four dimensions")
        torch._check(
            cache.shape[3] == q.shape[2], lambda name=name: f"{name} and q differ in head_dim"
        )
    dims = 2 if page_indptr is None else 1
    torch._check(page_table.dim() == dims, lambda: f"page_table must have {dims} dimensions")
    torch._check(kv_lens.dim() == 1, lambda: "kv_lens must be a vector")
    if out is not None:
        torch._check(out.dim() == 3, lambda: "out must have three dimensions")
        for at in range(3):
            torch._check(out.shape[at] == q.shape[at], lambda: f"out {out.shape}, q {q.shape}")


def _fake(q, k_cache, v_cache, page_table, kv_lens, *, page_indptr=None, backend=None,
          return_lse=False, **_):  # fmt: skip
    _check_fake(q, k_cache, v_cache, page_table, kv_lens, backend, page_indptr)
    lse = q.new_empty(q.shape[:2] if return_lse else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), lse


def _fake_out(
    q, k_cache, v_cache, page_table, kv_lens, out, *, page_indptr=None, backend=None, **_
):
    _check_fake(q, k_cache, v_cache, page_table, kv_lens, backend, page_indptr, out)


def _fake_scaled(q, k_cache, v_cache, page_table, kv_lens, out_scale, **options):
    out, lse = _fake(q, k_cache, v_cache, page_table, kv_lens, **options)
    return out.new_empty(out.shape, dtype=FP8), lse


def _fake_scaled_out(q, k_cache, v_cache, page_table, kv_lens, out_scale, out, **options):
    _fake_out(q, k_cache, v_cache, page_table, kv_lens, out, **options)


Run = Callable[[Call], tuple[Tensor, "Tensor | None"]]


def register(run: Run, run_scaled: Run) -> torch.library.Library:
    """Define the operators; `run` runs a call on its device, `run_scaled` one with scales.

    Returns:
        The registration, which lasts as long as the object does.
    """

    def functional(q, k_cache, v_cache, page_table, kv_lens, **options):
        out, lse = run(_call(q, k_cache, v_cache, page_table, kv_lens, **options))
        return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse

    def into(q, k_cache, v_cache, page_table, kv_lens, out, **options):
        run(_call(q, k_cache, v_cache, page_table, kv_lens, out=out, **options))

    def scaled(q, k_cache, v_cache, page_table, kv_lens, out_scale, **options):
        call = _call(q, k_cache, v_cache, page_table, kv_lens, out_scale=out_scale, **options)
        out, lse = run_scaled(call)
        return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse

    def scaled_into(q, k_cache, v_cache, page_table, kv_lens, out_scale, out, **options):
        options |= {"out_scale": out_scale, "out": out}
        run_scaled(_call(q, k_cache, v_cache, page_table, kv_lens, **options))

    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    define(library, SCHEMA, functional, _fake)
    define(library, OUT_SCHEMA, into, _fake_out)
    define(library, SCALED_SCHEMA, scaled, _fake_scaled)
    define(library, SCALED_OUT_SCHEMA, scaled_into, _fake_scaled_out)
    return library
