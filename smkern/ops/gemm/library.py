"""`smkern::gemm` and `smkern::gemm_out` in torch.library: for torch.compile, fake tensors, modes.

Eager calls do not come through here: the dispatcher of torch costs more than the launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smkern.ops import aliasing, validate
from smkern.ops.gemm.eager import eager_gemm
from smkern.ops.namespace import NAMESPACE
from smkern.ops.reference import gemm as reference

_OPTIONS = (
    "Tensor? bias=None, Tensor? residual=None, str? activation=None, "
    "bool batch_invariant=False, str? backend=None, bool static_weights=False, "
    "SymInt? num_sms=None"
)
GEMM_SCHEMA = f"gemm(Tensor a, Tensor w, *, {_OPTIONS}) -> Tensor"
GEMM_OUT_SCHEMA = (
    f"gemm_out(Tensor a, Tensor w, Tensor(a!) out, *, {_OPTIONS}, Tensor(b!)? workspace=None) -> ()"
)


def gemm_cpu(
    a: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """The reference, with the checks that the GPU path makes; a budget only has to be positive."""
    validate.check_tensors(a, w, bias, residual, out, activation, backend)
    if num_sms is not None:
        validate.as_num_sms(num_sms)
    if out is not None:
        aliasing.check_overlap(out, {"a": a, "w": w, "bias": bias, "residual": residual})
    with torch.no_grad():
        return reference.gemm(a, w, bias=bias, residual=residual, activation=activation, out=out)


def _gemm_cpu(a, w, *, bias=None, residual=None, activation=None,
              batch_invariant=False, backend=None, static_weights=False, num_sms=None):  # fmt: skip
    return gemm_cpu(a, w, bias, residual, activation, batch_invariant, backend, num_sms)


def _gemm_out_cpu(a, w, out, *, bias=None, residual=None, activation=None,
                  batch_invariant=False, backend=None, static_weights=False, num_sms=None,
                  workspace=None):  # fmt: skip
    gemm_cpu(a, w, bias, residual, activation, batch_invariant, backend, num_sms, out, workspace)


def _gemm_cuda(a, w, *, bias=None, residual=None, activation=None,
               batch_invariant=False, backend=None, static_weights=False,
               num_sms=None):  # fmt: skip
    return eager_gemm(a.get_device())(
        a, w, bias, residual, activation, None, None, batch_invariant, backend, num_sms,
        static_weights,
    )  # fmt: skip


def _gemm_out_cuda(a, w, out, *, bias=None, residual=None, activation=None,
                   batch_invariant=False, backend=None, static_weights=False, num_sms=None,
                   workspace=None):  # fmt: skip
    eager_gemm(a.get_device())(
        a, w, bias, residual, activation, out, workspace, batch_invariant, backend, num_sms,
        static_weights,
    )  # fmt: skip


def _check_fake(a, w, bias, residual, out, activation, backend) -> None:
    """Shape rules that symbolic sizes can be held to; the rest is checked when it runs."""
    validate.check_choices(activation, backend)
    torch._check(a.dim() == 2 and w.dim() == 2, lambda: "a and w must be matrices")
    torch._check(a.shape[1] == w.shape[1], lambda: f"a {a.shape} and w {w.shape} differ in K")
    if bias is not None:
        torch._check(bias.dim() == 1, lambda: "bias must be a vector")
        torch._check(bias.shape[0] == w.shape[0], lambda: f"bias {bias.shape} is not [N]")
    for name, x in (("residual", residual), ("out", out)):
        if x is not None:
            torch._check(x.dim() == 2, lambda name=name: f"{name} must be a matrix")
            torch._check(x.shape[0] == a.shape[0], lambda name=name: f"{name} is not [M, N]")
            torch._check(x.shape[1] == w.shape[0], lambda name=name: f"{name} is not [M, N]")


def _gemm_fake(a, w, *, bias=None, residual=None, activation=None,
               batch_invariant=False, backend=None, static_weights=False,
               num_sms=None):  # fmt: skip
    _check_fake(a, w, bias, residual, None, activation, backend)
    return a.new_empty((a.shape[0], w.shape[0]))


def _gemm_out_fake(a, w, out, *, bias=None, residual=None, activation=None,
                   batch_invariant=False, backend=None, static_weights=False, num_sms=None,
                   workspace=None):  # fmt: skip
    _check_fake(a, w, bias, residual, out, activation, backend)


def register() -> torch.library.Library:
    """Define both operators with their CPU, CUDA and fake implementations.

    Returns:
        The registration, which lasts as long as the object does.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    library.define(GEMM_SCHEMA, tags=tags)
    library.define(GEMM_OUT_SCHEMA, tags=tags)
    library.impl("gemm", _gemm_cpu, "CPU")
    library.impl("gemm", _gemm_cuda, "CUDA")
    library.impl("gemm_out", _gemm_out_cpu, "CPU")
    library.impl("gemm_out", _gemm_out_cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::gemm", _gemm_fake, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::gemm_out", _gemm_out_fake, lib=library)
    return library


LIBRARY = register()
