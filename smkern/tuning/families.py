"""All families that have a tuned table."""

from __future__ import annotations

from typing import Any

from smkern.tuning.append import APPEND_FAMILY
from smkern.tuning.attention.select import ATTENTION_FAMILY
from smkern.tuning.family import Family
from smkern.tuning.fp8_table import FP8_FAMILY
from smkern.tuning.grouped import GROUPED_FAMILY
from smkern.tuning.moe import MOE_FAMILY
from smkern.tuning.sample import SAMPLE_FAMILY
from smkern.tuning.select import GEMM_FAMILY

FAMILIES: tuple[Family[Any, Any], ...] = (
    GEMM_FAMILY,
    FP8_FAMILY,
    ATTENTION_FAMILY,
    APPEND_FAMILY,
    SAMPLE_FAMILY,
    MOE_FAMILY,
    GROUPED_FAMILY,
)
