"""What the arguments of the operators of a mixture of experts must be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.operator import Shapes
from smkern.tuning.moe import MAX_EXPERTS, MAX_TOP_K, VECTOR

MAX_CHOICES = 2**30


def check_table(name: str, x: Any, dtype: torch.dtype, *, dense: bool) -> None:
    """Raise ArgumentError unless x is a matrix of choices: weights or experts."""
    checks.check_tensor(name, x, 2, "[tokens, top_k]")
    checks.check_inner(name, x)
    if x.dtype is not dtype:
        raise ArgumentError(f"{name} is {x.dtype}, wanted {dtype}: convert it by .to({dtype})")
    if dense and x.shape[0] > 1 and x.stride(0) != x.shape[1]:
        raise ArgumentError(
            f"{name} has strides {x.stride()} for shape {list(x.shape)}: choices must lie without "
            f"gaps; call {name}.contiguous()"
        )


def check_experts(num_experts: Any) -> int:
    """Raise ArgumentError for a count of experts that is not served."""
    return checks.as_int("num_experts", num_experts, 1, MAX_EXPERTS)


def check_top_k(name: str, top_k: Any, most: int = MAX_TOP_K) -> int:
    """Raise ArgumentError for a count of choices that is not served."""
    return checks.as_int(name, top_k, 1, min(most, MAX_TOP_K))


def check_choices(tokens: int, top_k: int) -> None:
    """Raise ArgumentError for more choices than are counted in 32 bits."""
    if tokens * top_k > MAX_CHOICES:
        raise ArgumentError(
            f"{tokens} tokens of {top_k} choices are more than {MAX_CHOICES}: split the step"
        )


def check_expert_weights(call: Any) -> None:
    """Raise ArgumentError for weights and offsets of a grouped GEMM that cannot be served."""
    a, w = call.a, call.w
    check_experts(w.shape[0])
    if w.shape[2] != a.shape[1] or not w.shape[1] or not w.shape[2]:
        raise ArgumentError(
            f"w has shape {list(w.shape)}, a {list(a.shape)}: wanted [experts, n, {a.shape[1]}], "
            "n and k at least 1"
        )
    if call.swiglu and w.shape[1] % 2:
        raise ArgumentError(
            f"w has {w.shape[1]} rows an expert: swiglu=True wants as many gate rows as up rows; "
            "pass an even number, or swiglu=False"
        )
    if w.shape[0] * w.shape[1] > checks.MAX_SIZE:
        raise ArgumentError(
            f"w has {w.shape[0]} x {w.shape[1]} rows, the largest number is {checks.MAX_SIZE}: "
            "split the experts"
        )
    checks.check_vector(
        "expert_offsets", call.expert_offsets, w.shape[0] + 1, torch.int32, "[experts + 1]"
    )


def check_offsets(call: Any) -> None:
    """`check=True`: raise ArgumentError unless offsets begin at 0, never decrease and fit a's rows.

    It waits for the device, once.
    """
    offsets, rows = call.expert_offsets.tolist(), call.a.shape[0]
    remedy = (
        "pass the offsets and all rows of smkern.moe_permute, or the cumulative sum of [0, *counts]"
    )
    if offsets[0]:
        raise ArgumentError(f"expert_offsets[0] is {offsets[0]}, wanted 0: {remedy}")
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        if not begin <= end <= rows:
            raise ArgumentError(
                f"expert_offsets[{expert + 1}] is {end}, wanted {begin} (expert_offsets[{expert}]) "
                f"to {rows} (rows of a): {remedy}"
            )


def check_permuted(call: Any) -> None:
    """Raise ArgumentError for rows and choices that cannot be permuted."""
    x, experts = call.x, call.experts
    checks.check_rows("x", x, 2, "[tokens, hidden]")
    check_table("experts", experts, torch.int32, dense=True)
    if experts.shape[0] != x.shape[0]:
        raise ArgumentError(
            f"experts has shape {list(experts.shape)}, x {list(x.shape)}: one row a token is wanted"
        )
    check_experts(call.num_experts)
    check_top_k("experts.shape[1]", experts.shape[1])
    check_choices(*experts.shape)


def permuted_shapes(call: Any, dtype: torch.dtype) -> Shapes:
    """Shapes and dtypes of a checked permutation's results."""
    count = call.experts.shape[0] * call.experts.shape[1]
    return (
        ((count, call.x.shape[1]), dtype),
        ((call.num_experts + 1,), torch.int32),
        ((count,), torch.int32),
    )


def gpu_dtype(name: str, x: Tensor) -> Any:
    """The name of a dtype that the GPU kernels take.

    Raises:
        ArgumentError: fp32, which only the reference takes.
    """
    if x.dtype is torch.float32:
        raise ArgumentError(f"{name} is torch.float32 on a GPU: use torch.bfloat16 or float16")
    return checks.NAMES[x.dtype]


def row_step(x: Tensor | None, width: int) -> int:
    """Elements between rows; a single row gets a pitch that is as good as aligned."""
    if x is None:
        return 0
    return int(x.stride(0)) if x.shape[0] > 1 else -(-width // VECTOR) * VECTOR


def whole(width: int, *rows: Tensor | None) -> bool:
    """Whether rows come in whole 16-byte pieces, but for their base address."""
    return width % VECTOR == 0 and not any(row_step(x, width) % VECTOR for x in rows)


def results_of(out: Any, *names: str) -> tuple[Any, ...]:
    """The tensors of an optional `out`, None for each that is to be made.

    Raises:
        ArgumentError: anything but a sequence of so many.
    """
    if out is None:
        return (None,) * len(names)
    if not isinstance(out, tuple | list) or len(out) != len(names):
        count = f" of {len(out)}" if isinstance(out, tuple | list) else ""
        given = f"{type(out).__name__}{count}"
        raise ArgumentError(f"out is {given}: pass ({', '.join(names)}), or None")
    return tuple(out)
