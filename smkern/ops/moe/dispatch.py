"""From a problem of a mixture of experts to its launch on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

from smkern.ops.operator_dispatch import OperatorDispatcher, load_dispatcher
from smkern.tuning.moe import MOE_FAMILY, MoeConfig


@cache
def moe_dispatcher(index: int) -> OperatorDispatcher[Any, MoeConfig]:
    """Routing's and the permutations' dispatcher of a device that is present."""
    from smkern.kernels.moe_launch import MoeKernels

    return load_dispatcher(index, MoeKernels, MOE_FAMILY.selector)
