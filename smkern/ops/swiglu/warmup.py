"""The part of a warmup that is GEMMs with SwiGLU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smkern.ops import checks
from smkern.ops.annotated import check_fields
from smkern.ops.gemm.warmup import GemmCalls, work_of
from smkern.ops.operator_eager import eager_operator
from smkern.ops.swiglu.operator import EPILOGUE, GEMM_SWIGLU
from smkern.ops.warming import Target, Work, check_shapes


@dataclass(frozen=True, slots=True)
class SwigluCalls:
    """Calls of `smkern.gemm_swiglu` to come, for `smkern.warmup`: with M up to `max_m`.

    Args:
        shapes: (I, K) of weights [2 * I, K].
        max_m: Largest M.
        dtypes: torch.bfloat16, torch.float16 or both.
        batch_invariant: False, True or both.

    Raises:
        ArgumentError: a shape, dtype or `max_m` that cannot be.

    Example:
        >>> import smkern
        >>> calls = smkern.SwigluCalls(shapes=[(14336, 4096)], max_m=256)
    """

    shapes: Sequence[tuple[int, int]]
    max_m: int = 8192
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,)
    batch_invariant: Sequence[bool] = (False,)

    def __post_init__(self) -> None:
        check_fields(self)
        check_shapes(self.shapes, self.max_m, "I")
        for dtype in self.dtypes:
            checks.dtype_name(dtype)

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        calls = GemmCalls(
            [(2 * inner, k) for inner, k in self.shapes],
            self.max_m,
            [checks.dtype_name(dtype) for dtype in self.dtypes],
            [EPILOGUE],
            self.batch_invariant,
        )
        return work_of(eager_operator(GEMM_SWIGLU, target.index), calls, target)
