"""Device code and its launches. No validation, no torch dispatch."""

from smkern.kernels.gemm_launch import GemmKernels, GemmPlan
from smkern.kernels.gemm_schedule import Schedule, make_schedule
from smkern.kernels.ledger import Counters, counters

__all__ = ["Counters", "GemmKernels", "GemmPlan", "Schedule", "counters", "make_schedule"]
