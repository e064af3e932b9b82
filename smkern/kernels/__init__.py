"""Device code and its launches. No validation, no torch dispatch."""

from smkern.kernels.launch import (
    Counters,
    GemmKernels,
    GemmPlan,
    Schedule,
    counters,
    make_schedule,
)

__all__ = ["Counters", "GemmKernels", "GemmPlan", "Schedule", "counters", "make_schedule"]
