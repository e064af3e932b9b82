"""`smkern::gemm_swiglu` and `smkern::gemm_swiglu_out` in torch.library, as the GEMM's there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.ops import aliasing, validate
from smkern.ops.namespace import NAMESPACE
from smkern.ops.reference.swiglu import gemm_swiglu as reference
from smkern.ops.swiglu.eager import check_swiglu, eager_swiglu

_OPTIONS = (
    "bool batch_invariant=False, str? backend=None, bool static_weights=False, SymInt? num_sms=None"
)
SCHEMAS = (
    f"gemm_swiglu(Tensor a, Tensor w_gate_up, *, {_OPTIONS}) -> Tensor",
    f"gemm_swiglu_out(Tensor a, Tensor w_gate_up, Tensor(a!) out, *, {_OPTIONS}, "
    "Tensor(b!)? workspace=None) -> ()",
)


def gemm_swiglu_cpu(
    a: Tensor,
    w_gate_up: Tensor,
    out: Tensor | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """The reference, with the checks that the GPU path makes; a budget only has to be positive."""
    check_swiglu(a, w_gate_up, out, backend)
    if num_sms is not None:
        validate.as_num_sms(num_sms)
    if out is not None:
        aliasing.check_overlap(out, {"a": a, "w_gate_up": w_gate_up})
    with torch.no_grad():
        return reference(a, w_gate_up, out=out)


def _cpu(a: Tensor, w_gate_up: Tensor, *, backend=None, num_sms=None, **_: Any) -> Tensor:
    return gemm_swiglu_cpu(a, w_gate_up, None, backend, num_sms)


def _out_cpu(a: Tensor, w_gate_up: Tensor, out: Tensor, *, backend=None, num_sms=None, **_: Any):
    gemm_swiglu_cpu(a, w_gate_up, out, backend, num_sms)


def _cuda(a, w_gate_up, *, batch_invariant=False, backend=None, static_weights=False,
          num_sms=None):  # fmt: skip
    return eager_swiglu(a.get_device())(
        a, w_gate_up, None, None, None, None, None, batch_invariant, backend, num_sms,
        static_weights,
    )  # fmt: skip


def _out_cuda(a, w_gate_up, out, *, batch_invariant=False, backend=None, static_weights=False,
              num_sms=None, workspace=None):  # fmt: skip
    eager_swiglu(a.get_device())(
        a, w_gate_up, None, None, None, out, workspace, batch_invariant, backend, num_sms,
        static_weights,
    )  # fmt: skip


def _check_fake(a: Tensor, w: Tensor, out: Tensor | None, backend: Any) -> None:
    """Shape rules that symbolic sizes can be held to; the rest is checked when it runs."""
    validate.check_choices(None, backend)
    torch._check(a.dim() == 2 and w.dim() == 2, lambda: "a and w_gate_up must be matrices")
    torch._check(a.shape[1] == w.shape[1], lambda: f"a {a.shape}, w_gate_up {w.shape} differ in K")
    torch._check(w.shape[0] % 2 == 0, lambda: f"w_gate_up {w.shape} has an odd number of rows")
    if out is not None:
        torch._check(out.dim() == 2, lambda: "out must be a matrix")
        torch._check(out.shape[0] == a.shape[0], lambda: "out is not [M, I]")
        torch._check(out.shape[1] == w.shape[0] // 2, lambda: "out is not [M, I]")


def _fake(a: Tensor, w_gate_up: Tensor, *, backend=None, **_: Any) -> Tensor:
    _check_fake(a, w_gate_up, None, backend)
    return a.new_empty((a.shape[0], w_gate_up.shape[0] // 2))


def _out_fake(a: Tensor, w_gate_up: Tensor, out: Tensor, *, backend=None, **_: Any) -> None:
    _check_fake(a, w_gate_up, out, backend)


def register() -> torch.library.Library:
    """Define both operators with their CPU, CUDA and fake implementations.

    Returns:
        The registration, which lasts as long as the object does.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    made: dict[str, tuple[Any, Any, Any]] = {
        "gemm_swiglu": (_cpu, _cuda, _fake),
        "gemm_swiglu_out": (_out_cpu, _out_cuda, _out_fake),
    }
    for schema, (name, (cpu, cuda, fake)) in zip(SCHEMAS, made.items(), strict=True):
        library.define(schema, tags=tags)
        library.impl(name, cpu, "CPU")
        library.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


LIBRARY = register()
