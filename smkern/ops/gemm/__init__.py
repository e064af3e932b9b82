"""GEMM with an SM budget: the operator, and questions about it."""

from smkern.ops.gemm.explain import explain_gemm, gemm_workspace_bytes
from smkern.ops.gemm.operator import gemm

__all__ = ["explain_gemm", "gemm", "gemm_workspace_bytes"]
