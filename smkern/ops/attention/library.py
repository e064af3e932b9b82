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

_TENSORS = ("q", "k_cache", "v_cache", "page_table", "kv_lens")
_OPTIONS = (
    "Tensor? page_indptr=None, Tensor? cu_q_lens=None, SymInt? max_q_len=None, bool causal=True, "
    "float? scale=None, SymInt? window=None, float? softcap=None, Tensor? sinks=None, "
    "float? k_scale=None, float? v_scale=None, Tensor? k_scale_tensor=None, "
    "Tensor? v_scale_tensor=None, Tensor? plan_buffer=None, Tensor? plan_workspace=None, "
    "SymInt[]? plan_numbers=None, bool check=False, str? backend=None, SymInt? num_sms=None"
)


def _call(given: dict[str, Any]) -> Call:
    """A call from an operator's arguments."""
    plan = None
    parts = [given.pop(f"plan_{part}", None) for part in ("numbers", "buffer", "workspace")]
    if all(x is not None for x in parts):
        plan = plan_from_numbers(*parts)
    for name in ("k_scale", "v_scale"):
        tensor = given.pop(f"{name}_tensor", None)
        given[name] = given.get(name) if tensor is None else tensor
    defaults = {"causal": True, "return_lse": False, "check": False}
    return Call(**(dict.fromkeys(Call._fields) | defaults | given | {"plan": plan}))


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


def _fake(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Results by the shape rules that symbolic sizes can be held to; the run checks the rest."""
    q, out, page_table = given["q"], given.get("out"), given["page_table"]
    check_choice("backend", given.get("backend"), BACKENDS)
    torch._check(q.dim() == 3, lambda: f"q {q.shape} is not [tokens, q_heads, head_dim]")
    for name in ("k_cache", "v_cache"):
        cache = given[name]
        torch._check(cache.dim() == 4, lambda name=name: f"{name} must have four dimensions")
        torch._check(
            cache.shape[3] == q.shape[2], lambda name=name: f"{name} and q differ in head_dim"
        )
    dims = 2 if given.get("page_indptr") is None else 1
    torch._check(page_table.dim() == dims, lambda: f"page_table must have {dims} dimensions")
    torch._check(given["kv_lens"].dim() == 1, lambda: "kv_lens must be a vector")
    if out is not None:
        torch._check(out.dim() == 3, lambda: "out must have three dimensions")
        for at in range(3):
            torch._check(out.shape[at] == q.shape[at], lambda: f"out {out.shape}, q {q.shape}")
    lse = q.new_empty(q.shape[:2] if given.get("return_lse") else (0,), dtype=torch.float32)
    return q.new_empty(q.shape, dtype=FP8 if "out_scale" in given else q.dtype), lse


Run = Callable[[Call], tuple[Tensor, "Tensor | None"]]


def register(run: Run, run_scaled: Run) -> torch.library.Library:
    """Define the operators; `run` runs a call on its device, `run_scaled` one with scales.

    Returns:
        The registration, which lasts as long as the object does.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    _define(library, "paged_attention", _TENSORS, "", run)
    scales = ", Tensor(c!) out_scale"
    _define(library, "scaled_paged_attention", (*_TENSORS, "out_scale"), scales, run_scaled)
    return library


def _define(
    library: torch.library.Library, name: str, names: tuple[str, ...], scales: str, run: Run
) -> None:
    """Define the functional operator, whose tensors have these names, and its `_out`."""
    tensors = ", ".join(f"Tensor {x}" for x in _TENSORS) + scales

    def named(given: tuple[Tensor, ...], options: dict[str, Any]) -> dict[str, Any]:
        return dict(zip((*names, "out"), given, strict=False)) | options

    def functional(*given, **options):
        out, lse = run(_call(named(given, options)))
        return out, out.new_empty(0, dtype=torch.float32) if lse is None else lse

    def into(*given, **options):
        run(_call(named(given, options)))

    def fake(*given, **options):
        return _fake(named(given, options))

    def fake_into(*given, **options):
        _fake(named(given, options))

    results = "bool return_lse=False) -> (Tensor out, Tensor lse)"
    define(library, f"{name}({tensors}, *, {_OPTIONS}, {results}", functional, fake)
    places = f"Tensor(a!) out, *, {_OPTIONS}, Tensor(b!)? lse=None) -> ()"
    define(library, f"{name}_out({tensors}, {places}", into, fake_into)
