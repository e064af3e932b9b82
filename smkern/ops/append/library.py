"""The append operators in torch.library: for torch.compile, modes, fakes.

Caches are declared as written. `qk_norm_rope_append` returns a new tensor, `_out` writes q's result
into another, `qk_norm_rope_append_` into q itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smkern.ops.append import aliasing
from smkern.ops.append.call import Call, check_call
from smkern.ops.append.eager import run
from smkern.ops.operator_library import NAMESPACE

_KV = (
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, Tensor kv_lens"
)
_WHERE = (
    "Tensor? page_indptr=None, Tensor? cu_q_lens=None, float? k_scale=None, float? v_scale=None, "
    "Tensor? k_scale_tensor=None, Tensor? v_scale_tensor=None, bool check=False, "
    "SymInt? num_sms=None"
)
_TURN = (
    "Tensor? cos_sin=None, bool interleaved=False, Tensor? q_norm=None, Tensor? k_norm=None, "
    "float eps=1e-06, Tensor? positions=None"
)
SCHEMAS = (
    f"append_kv({_KV}, *, {_WHERE}) -> ()",
    f"qk_norm_rope_append(Tensor q, {_KV}, *, {_TURN}, {_WHERE}) -> Tensor",
    f"qk_norm_rope_append_out(Tensor q, {_KV}, Tensor(c!) out, *, {_TURN}, {_WHERE}) -> ()",
    f"qk_norm_rope_append_(Tensor(c!) q, {_KV}, *, {_TURN}, {_WHERE}) -> ()",
)
_SAME = ("page_indptr", "cu_q_lens", "check", "num_sms")
_TURNING = ("cos_sin", "interleaved", "q_norm", "k_norm", "eps", "positions")


def through_library(call: Call) -> Tensor | None:
    """By torch's dispatcher: under torch.compile, modes and transforms, for tensor subclasses."""
    rows = (call.k, call.v, call.k_cache, call.v_cache, call.page_table, call.kv_lens)
    if not torch.compiler.is_compiling() and not all(isinstance(x, Tensor) for x in rows):
        check_call(call)
    options = {name: getattr(call, name) for name in _SAME}
    for name in ("k_scale", "v_scale"):
        value = getattr(call, name)
        options[f"{name}_tensor" if isinstance(value, Tensor) else name] = value
    operators = torch.ops.smkern
    if call.plain:
        operators.append_kv(*rows, **options)
        return None
    options |= {name: getattr(call, name) for name in _TURNING}
    if call.out is None:
        result: Tensor = operators.qk_norm_rope_append(call.q, *rows, **options)
        return result
    if call.out is call.q or (not torch.compiler.is_compiling() and aliasing.is_in_place(call)):
        operators.qk_norm_rope_append_(call.q, *rows, **options)
    else:
        operators.qk_norm_rope_append_out(call.q, *rows, call.out, **options)
    return call.out


def _call(q: Any, *rows: Any, out: Any = None, **options: Any) -> Call:
    """A call from an operator's arguments."""
    for name in ("k_scale", "v_scale"):
        tensor = options.pop(f"{name}_tensor", None)
        if tensor is not None:
            options[name] = tensor
    given = dict(zip(Call._fields[1:7], rows, strict=True))
    return Call(**(options | given | {"q": q, "out": out}))


def _append_kv(*rows, **options):
    run(_call(None, *rows, **options))


def _functional(q, *rows, **options):
    return run(_call(q, *rows, **options))


def _out(q, k, v, k_cache, v_cache, page_table, kv_lens, out, **options):
    run(_call(q, k, v, k_cache, v_cache, page_table, kv_lens, out=out, **options))


def _in_place(q, *rows, **options):
    run(_call(q, *rows, out=q, **options))


def _check_fake(k, v, k_cache, v_cache, page_table, kv_lens, *, page_indptr=None, **_) -> None:
    """Shape rules that symbolic sizes can be held to; the rest is checked when it runs."""
    for name, x in (("k", k), ("v", v)):
        torch._check(x.dim() == 3, lambda name=name: f"{name} is not [tokens, kv_heads, head_dim]")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        torch._check(cache.dim() == 4, lambda name=name: f"{name} must have four dimensions")
        for at in (1, 2):
            torch._check(
                cache.shape[at + 1] == k.shape[at], lambda name=name: f"{name} and k differ"
            )
    dims = 2 if page_indptr is None else 1
    torch._check(page_table.dim() == dims, lambda: f"page_table must have {dims} dimensions")
    torch._check(kv_lens.dim() == 1, lambda: "kv_lens must be a vector")


def _fake_kv(*rows, **options):
    _check_fake(*rows, **options)


def _fake(q, *rows, **options):
    torch._check(q.dim() == 3, lambda: f"q {q.shape} is not [tokens, q_heads, head_dim]")
    _check_fake(*rows, **options)
    return q.new_empty(q.shape)


def _fake_out(q, k, v, k_cache, v_cache, page_table, kv_lens, out, **options):
    _fake(q, k, v, k_cache, v_cache, page_table, kv_lens, **options)
    for at in range(3):
        torch._check(out.shape[at] == q.shape[at], lambda: f"out {out.shape}, q {q.shape}")


def _fake_in_place(q, *rows, **options):
    _fake(q, *rows, **options)


def register() -> torch.library.Library:
    """Define the operators with their CPU, CUDA and fake implementations.

    Returns:
        The registration, which lasts as long as the object does.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    runs: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "append_kv": (_append_kv, _fake_kv),
        "qk_norm_rope_append": (_functional, _fake),
        "qk_norm_rope_append_out": (_out, _fake_out),
        "qk_norm_rope_append_": (_in_place, _fake_in_place),
    }
    for schema in SCHEMAS:
        library.define(schema, tags=tags)
    for name, (implementation, fake) in runs.items():
        library.impl(name, implementation, "CPU")
        library.impl(name, implementation, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


LIBRARY = register()
