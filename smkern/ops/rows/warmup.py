"""The rows' part of a warmup: every kernel of a model's norms, activations and embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smkern.errors import ArgumentError
from smkern.ops.annotated import check_fields
from smkern.ops.operator import Operator
from smkern.ops.operator_check import check_operator
from smkern.ops.operator_warmup import work_of_calls
from smkern.ops.rows.call import AddRmsNorm, Embedding, RmsNorm, SiluAndMul, problem_of
from smkern.ops.rows.operators import ADD_RMS_NORM, EMBEDDING, RMS_NORM, SILU_AND_MUL
from smkern.ops.warming import Target, Work, room


@dataclass(frozen=True, slots=True)
class RowsCalls:
    """Calls to come, for `smkern.warmup`: what a model fixes; tokens are free.

    Args:
        hidden: Widths of `rms_norm`, one a model.
        added: Widths of `add_rms_norm`.
        gated: I of `silu_and_mul`.
        embedded: Widths of `embedding`'s tables.
        dtype: Dtype of the rows: torch.bfloat16 or torch.float16.
        weight_dtype: Dtype of the norms' weights. None: `dtype`.
        index_dtypes: Dtypes of the ids.

    Raises:
        ArgumentError: widths or dtypes that cannot be, or no call at all.

    Example:
        >>> import smkern
        >>> llama = smkern.RowsCalls(hidden=[4096], gated=[14336], embedded=[4096])
        >>> smkern.warmup(calls=[llama])  # doctest: +SKIP
    """

    hidden: Sequence[int] = ()
    added: Sequence[int] = ()
    gated: Sequence[int] = ()
    embedded: Sequence[int] = ()
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None
    index_dtypes: Sequence[torch.dtype] = (torch.int32,)

    def __post_init__(self) -> None:
        check_fields(self)
        made = self.calls(torch.device("meta"), True)
        if not made:
            raise ArgumentError("RowsCalls() names no width: give hidden, added, gated or embedded")
        for op, call in made:
            check_operator(op, call)
            if problem_of(call, True) is None:
                raise ArgumentError(f"{op.name} of width 0: give widths of at least 1")

    def calls(self, device: torch.device, aligned: bool) -> list[tuple[Operator[Any], Any]]:
        """A call of one row of each kind, on tensors of its own."""
        kind = self.dtype
        found: list[tuple[Operator[Any], Any]] = []

        def row(width: int) -> torch.Tensor:
            return room((1, width), kind, aligned, device)

        def weight(width: int) -> torch.Tensor:
            return room((width,), self.weight_dtype or kind, aligned, device)

        for width in self.hidden:
            found.append((RMS_NORM, RmsNorm(row(width), weight(width))))
        for width in self.added:
            found.append((ADD_RMS_NORM, AddRmsNorm(row(width), row(width), weight(width))))
        for width in self.gated:
            found.append((SILU_AND_MUL, SiluAndMul(row(2 * width))))
        for width in self.embedded:
            for index in self.index_dtypes:
                ids = torch.zeros(1, dtype=index, device=device)
                found.append((EMBEDDING, Embedding(ids, row(width))))
        return found

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        return work_of_calls(self.calls, target)
