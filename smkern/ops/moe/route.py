"""`topk_softmax`: which experts a token goes to, and how much each counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.ops import checks
from smkern.ops.moe.check import check_choices, check_experts, check_top_k, results_of
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.operator import Operator, Shapes, call_class
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import moe as reference
from smkern.tuning.moe import TopkProblem

Topk = call_class(
    "Topk", "Tensor logits, int top_k, *, bool renormalize=True", ("weights", "experts")
)


def _check(call: Any) -> None:
    checks.check_rows("logits", call.logits, 2, "[tokens, experts]")
    check_experts(call.logits.shape[1])
    check_top_k("top_k", call.top_k, call.logits.shape[1])
    check_choices(call.logits.shape[0], call.top_k)


def _shapes(call: Any) -> Shapes:
    shape = (call.logits.shape[0], call.top_k)
    return ((shape, torch.float32), (shape, torch.int32))


def _problem(call: Any, aligned: bool) -> TopkProblem | None:
    tokens, experts = call.logits.shape
    if not tokens:
        return None
    dtype = checks.dtype_name(call.logits.dtype)
    return TopkProblem(tokens, experts, call.top_k, bool(call.renormalize), dtype)


def _numbers(call: Any) -> tuple[int, ...]:
    strides = (x.stride(0) for x in (call.logits, call.weights, call.experts))
    return (*strides, call.logits.shape[0])


TOPK: Operator[TopkProblem] = Operator(
    name="topk_softmax",
    call=Topk,
    check=_check,
    shapes=_shapes,
    problem=_problem,
    numbers=_numbers,
    reference=lambda call: reference.topk_softmax(
        call.logits, call.top_k, renormalize=bool(call.renormalize)
    ),
    dispatcher=moe_dispatcher,
)
LIBRARY = register(TOPK)
_topk = entry(TOPK)


def topk_softmax(
    logits: Tensor,
    top_k: int,
    *,
    renormalize: bool = True,
    out: tuple[Tensor, Tensor] | None = None,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The `top_k` most likely experts of each token, on at most `num_sms` SMs.

    p = softmax(logits) over all experts in fp32; the largest `top_k` of p, the largest first, of
    equals the lower expert; then divided by their sum. A row's bits depend on the row alone. A row
    with a NaN gets NaN weights and experts that exist.

    Args:
        logits: [tokens, experts], bf16, fp16 or fp32, rows may be apart; at most 512 experts.
        top_k: Experts of a token: 1 to 32.
        renormalize: Divide the weights by their sum.
        out: (weights, experts) to write into.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        Weights [tokens, top_k] fp32 and experts [tokens, top_k] int32.

    Raises:
        As `smkern.gemm`.

    Source: Qwen3 (arXiv 2505.09388) section 2; top-k of a softmax as in GShard (arXiv 2006.16668)
        section 2.2.

    Example:
        >>> import torch, smkern
        >>> weights, experts = smkern.topk_softmax(torch.tensor([[0.0, 1.0, 1.0, -1.0]]), 2)
        >>> weights.tolist(), experts.tolist()
        ([[0.5, 0.5]], [[1, 2]])
    """
    weights, experts = results_of(out, "weights", "experts")
    if top_k.__class__ is not int and not torch.compiler.is_compiling():
        top_k = checks.as_int("top_k", top_k, 1)
    found: tuple[Tensor, Tensor] = _topk(logits, top_k, renormalize, weights, experts, num_sms)
    return found
