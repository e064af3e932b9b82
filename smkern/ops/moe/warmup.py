"""The experts' part of a warmup: every kernel of a model's mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smkern.ops import checks
from smkern.ops.annotated import check_fields
from smkern.ops.moe.check import check_experts, check_top_k
from smkern.ops.moe.grouped import GROUPED, Grouped
from smkern.ops.moe.permute import PERMUTE, Permute
from smkern.ops.moe.route import TOPK, Topk
from smkern.ops.moe.unpermute import UNPERMUTE, Unpermute
from smkern.ops.operator import Operator
from smkern.ops.operator_check import check_operator
from smkern.ops.operator_warmup import work_of_calls
from smkern.ops.warming import Target, Work, room
from smkern.tuning.moe import VECTOR

MAX_WIDTH = 1 << 20
"""So that the elements of all experts' weights can be counted."""


@dataclass(frozen=True, slots=True)
class MoeCalls:
    """Calls to come, for `smkern.warmup`: what a model fixes; tokens and routing are free.

    Args:
        hidden: Width of a token's row.
        intermediate: I of an expert: w_gate_up is [experts, 2 * I, hidden], w_down
            [experts, hidden, I].
        num_experts: 1 to 512.
        top_k: Experts of a token.
        renormalize: As in `smkern.topk_softmax`.
        residual: Whether `moe_unpermute` has a residual.
        dtype: Dtype of rows and weights: torch.bfloat16 or torch.float16.
        logits_dtype: Dtype of the router's logits. None: `dtype`.

    Raises:
        ArgumentError: numbers or dtypes that cannot be.

    Example:
        >>> import smkern
        >>> qwen = smkern.MoeCalls(hidden=2048, intermediate=768, num_experts=128, top_k=8)
        >>> smkern.warmup(calls=[qwen])  # doctest: +SKIP
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    renormalize: bool = True
    residual: bool = True
    dtype: torch.dtype = torch.bfloat16
    logits_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("hidden", "intermediate"):
            checks.as_int(name, getattr(self, name), 1, MAX_WIDTH)
        check_experts(self.num_experts)
        check_top_k("top_k", self.top_k, self.num_experts)
        for op, call in self.calls(torch.device("meta"), True):
            check_operator(op, call)

    def calls(self, device: torch.device, aligned: bool) -> list[tuple[Operator[Any], Any]]:
        """A call of one token of each operator, on tensors of its own."""
        k, hidden, inner, experts = self.top_k, self.hidden, self.intermediate, self.num_experts

        def rows(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
            return room(shape, dtype or self.dtype, aligned, device)

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        logits = rows(1, experts, dtype=self.logits_dtype)
        weights = torch.zeros(1, k, dtype=torch.float32, device=device)
        residual = rows(1, hidden) if self.residual else None
        # kernels of grouped products know of their widths only whether they are whole vectors
        wide, deep = _least(inner), _least(hidden)
        gate_up, down = rows(experts, 2 * wide, deep), rows(experts, deep, wide)
        return [
            (TOPK, Topk(logits, k, self.renormalize)),
            (PERMUTE, Permute(rows(1, hidden), integers(1, k), experts)),
            (GROUPED, Grouped(rows(k, deep), gate_up, integers(experts + 1), True)),
            (GROUPED, Grouped(rows(k, wide), down, integers(experts + 1))),
            (UNPERMUTE, Unpermute(rows(k, hidden), integers(k), weights, residual)),
        ]

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        return work_of_calls(self.calls, target)


def _least(width: int) -> int:
    """The least width that is whole vectors if this one is."""
    return width % VECTOR or VECTOR
