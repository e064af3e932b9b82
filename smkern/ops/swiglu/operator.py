"""GEMM with SwiGLU in its epilogue: the public operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.limits import shown
from smkern.ops.fp8 import swiglu as fp8
from smkern.ops.gemm.call import LAUNCHED, bind, problem_from
from smkern.ops.gemm.checks import check_dtypes, check_gated_product, check_matrix
from smkern.ops.gemm.dispatch import gemm_dispatcher
from smkern.ops.operator import Operator, Shapes, call_class, filled_by
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import swiglu as reference
from smkern.tuning.config import Epilogue, GemmProblem

EPILOGUE = Epilogue(swiglu=True)


Swiglu = call_class(
    "Swiglu",
    "Tensor a, Tensor w_gate_up, *, bool batch_invariant=False, str? backend=None, "
    "bool static_weights=False",
    workspace=True,
)


def check_swiglu(call: Any) -> None:
    """Raise ArgumentError for a product that cannot be served."""
    a, w, out = call.a, call.w_gate_up, call.out
    check_gated_product(call)
    if out is not None:
        check_matrix("out", out)
        if out.shape != shapes_of(call)[0][0]:
            raise ArgumentError(
                f"out has shape {list(out.shape)}, wanted [{a.shape[0]}, {w.shape[0] // 2}]: a's "
                "rows, half of w_gate_up's"
            )
    check_dtypes(a, {"w_gate_up": w, "out": out})


def shapes_of(call: Any) -> Shapes:
    """Shape and dtype of a checked call's result."""
    return (((call.a.shape[0], call.w_gate_up.shape[0] // 2), call.a.dtype),)


def problem_of(call: Any, aligned: bool) -> GemmProblem | None:
    """What chooses the kernel of a checked call; None where nothing is multiplied."""
    return problem_from(call, EPILOGUE, [call.a, call.w_gate_up, call.out], aligned)


def by_reference(call: Any) -> Tensor:
    """The reference on a checked call; into `out`, if it has one."""
    return reference.gemm_swiglu(
        call.a, call.w_gate_up, out=call.out, batch_invariant=bool(call.batch_invariant)
    )


GEMM_SWIGLU: Operator[GemmProblem] = Operator(
    name="gemm_swiglu",
    call=Swiglu,
    check=check_swiglu,
    shapes=shapes_of,
    problem=problem_of,
    reference=by_reference,
    dispatcher=gemm_dispatcher,
    vectors=("a", "w_gate_up", "out"),
    arguments=tuple({"w": "w_gate_up", "bias": "0", "residual": "0"}.get(x, x) for x in LAUNCHED),
    unkeyed=("workspace",),
    prepare=bind,
    empty=filled_by(by_reference),
    kept_in_capture=False,  # see GEMM
)
LIBRARY = register(GEMM_SWIGLU)
_gemm_swiglu = entry(GEMM_SWIGLU)


def gemm_swiglu(
    a: Tensor,
    w_gate_up: Tensor,
    *,
    a_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    gate_up: Tensor | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    static_weights: bool = False,
    check: bool = False,
    num_sms: int | None = None,
) -> Tensor:
    """out = silu(a @ gate.T) * (a @ up.T), on at most `num_sms` SMs.

    silu(x) = x / (1 + exp(-x)). Both products are summed in fp32 and theirs is rounded once; where
    dispatch takes the plain GEMM followed by `silu_and_mul`, they are rounded before too. The
    weights lie as engines store them and are not repacked. CPU tensors run the reference in plain
    torch. There is no backward.

    Args:
        a: [M, K], bf16 or fp16 (fp32 on CPU tensors), or e4m3 with scales; rows may be apart, the
            inner stride is 1.
        w_gate_up: [2 * I, K], the gate's I rows, then up's; same dtype and device.
        a_scale: As in `smkern.gemm`. With scales, gate and up are rounded before their product.
        w_scale: As in `smkern.gemm`, for N = 2 * I.
        out_dtype: As in `smkern.gemm`.
        out: [M, I] to write into, rows may be apart; overlaps nothing.
        out_scale: With scales: write e4m3, and its scales here, as in `smkern.silu_and_mul`. Of
            blocks, where many rows are multiplied on sm_90, it is one kernel.
        gate_up: With `out_scale`, [M, 2 * I] in bf16 or fp16, contiguous: to what gate and up are
            rounded, and memory for them where they take any. None: bf16, and memory of the call's.
        workspace: Device memory of `gemm_swiglu_workspace_bytes` bytes, contiguous, zeroed before
            its first use; two launches that may overlap must not share it. None: the stream's own,
            or in a capture the graph's own.
        batch_invariant: A row's bits depend on that row alone, not on M nor the budget (CPU tensors
            are computed a row at a time for it).
        backend: None (tuned table, else cost model), "own" (fused, by our kernels), "model" (no
            table), "unfused" (the plain GEMM, then `silu_and_mul`), or a kernel's name.
        static_weights: The promise that nothing in flight on this stream writes `w_gate_up`: inside
            a partition the launch then fetches its first weights while the kernel before it still
            runs. It changes no result.
        check: As in `smkern.gemm`.
        num_sms: SMs to use at most. None: all that the current stream's partition has. Below
            that, the grid alone confines.

    Returns:
        [M, I] in `a`'s dtype, with scales in `out_dtype`: `out`, if given.

    Raises:
        As `smkern.gemm`.

    Source: GLU Variants Improve Transformer (arXiv 2002.05202), equation 6, without its biases.

    Example:
        >>> import torch, smkern
        >>> a = torch.ones(3, 8).bfloat16()
        >>> w_gate_up = torch.cat([torch.full((2, 8), 8.0), torch.ones(2, 8)]).bfloat16()
        >>> smkern.gemm_swiglu(a, w_gate_up, num_sms=16).tolist()
        [[512.0, 512.0], [512.0, 512.0], [512.0, 512.0]]
    """
    if out_scale is not None:
        fp8.given_scales(a_scale, w_scale)
        if out_dtype is not None:
            raise ArgumentError(
                f"out_dtype={shown(out_dtype)} with out_scale, whose result is e4m3: leave it out; "
                "gate_up= says to what gate and up are rounded"
            )
        quantized: Tensor = fp8.quantized_swiglu(
            a, w_gate_up, a_scale, w_scale, out_scale, gate_up, batch_invariant, backend,
            static_weights, check, out, workspace, num_sms,
        )  # fmt: skip
        return quantized
    if gate_up is not None:
        raise ArgumentError("gate_up is given without out_scale: pass both, or neither")
    if a_scale is not None or w_scale is not None or out_dtype is not None:
        fp8.given_scales(a_scale, w_scale)
        scaled: Tensor = fp8.scaled_swiglu(
            a, w_gate_up, a_scale, w_scale, out_dtype, batch_invariant, backend, static_weights,
            check, out, workspace, num_sms,
        )  # fmt: skip
        return scaled
    found: Tensor = _gemm_swiglu(
        a, w_gate_up, batch_invariant, backend, static_weights, out, workspace, num_sms
    )
    return found
