"""The eager path of `smkern.gemm_swiglu` on one device: the GEMM's, with checks of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import validate
from smkern.ops.gemm.eager import EagerGemm, eager_gemm
from smkern.tuning.config import Epilogue

SWIGLU = Epilogue(swiglu=True)


class EagerSwiglu(EagerGemm):
    """Launches GEMMs with SwiGLU on one device; dispatcher and workspaces are the GEMM's."""

    weights = "w_gate_up"

    def check(
        self, a: Any, w: Any, bias: Any, residual: Any, out: Any, activation: Any, backend: Any
    ) -> tuple[int, int, int, Epilogue]:
        m, inner, k = check_swiglu(a, w, out, backend)
        return m, 2 * inner, k, SWIGLU

    def without_kernel(
        self, a: Tensor, w: Tensor, bias: Any, residual: Any, activation: Any, out: Tensor
    ) -> Tensor:
        """M, I or K of 0: nothing to write, or silu(0) * 0."""
        return out.zero_() if out.numel() else out


def check_swiglu(a: Any, w_gate_up: Any, out: Any, backend: Any) -> tuple[int, int, int]:
    """Check everything about the tensors but their addresses.

    Returns:
        (M, I, K).

    Raises:
        ArgumentError: naming the argument, its value, what is wanted and what to do.
    """
    validate.check_choices(None, backend)
    validate.check_matrix("a", a)
    m, k = a.shape
    validate.check_matrix("w_gate_up", w_gate_up, None, k)
    rows = w_gate_up.shape[0]
    if rows % 2:
        raise ArgumentError(
            f"w_gate_up has {rows} rows, wanted an even number: the gate's I rows, then up's I; "
            "join both projections, torch.cat([w_gate, w_up])"
        )
    if out is not None:
        validate.check_matrix("out", out)
        if out.shape != (m, rows // 2):
            raise ArgumentError(
                f"out has shape {list(out.shape)}, wanted [{m}, {rows // 2}]: a's rows, half of "
                "w_gate_up's"
            )
        validate.check_writable(out)
    validate.dtype_name(a.dtype)
    validate.check_same(a, {"w_gate_up": w_gate_up, "out": out})
    return m, rows // 2, k


@cache
def eager_swiglu(index: int) -> EagerSwiglu:
    """The eager path of a device, made at its first call and kept for the process."""
    gemm = eager_gemm(index)
    return EagerSwiglu(index, gemm.dispatcher, gemm.workspaces, gemm.streams)
