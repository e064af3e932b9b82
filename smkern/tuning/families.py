"""All families that have a table."""

from __future__ import annotations

from typing import Any

from smkern.tuning.append import APPEND
from smkern.tuning.attention.select import ATTENTION
from smkern.tuning.family import Family
from smkern.tuning.grouped import GROUPED_GEMM
from smkern.tuning.moe import MOE
from smkern.tuning.sample import SAMPLING
from smkern.tuning.select import GEMM

FAMILIES: tuple[Family[Any, Any], ...] = (
    GEMM,
    ATTENTION,
    APPEND,
    SAMPLING,
    MOE,
    GROUPED_GEMM,
)
