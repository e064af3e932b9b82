"""One eager run of a call, with its result held against torch's, before anything is timed."""

from __future__ import annotations

from typing import Any

import torch

from smkern.measure.gemm import GemmOperands
from smkern.measure.timing import Call, try_eagerly

TOLERANCE = 1e-2
"""|out - torch| / |torch| of a bf16 product; rounding alone gives 2e-3, a wrong tile far more."""


def complaint(call: Call, stream: Any, ops: GemmOperands, m: int) -> str | None:
    """Run `call` once on `stream` into a poisoned output; None when it is right, else why not."""
    ops.reference(m)
    ops.poison(m)
    torch.cuda.synchronize()
    message = try_eagerly(call, stream)
    if message is not None:
        return message
    relative = ops.error(m)
    if relative < TOLERANCE:
        return None
    return f"wrong result: |out - torch| / |torch| is {relative:.3g}, at most {TOLERANCE} allowed"
