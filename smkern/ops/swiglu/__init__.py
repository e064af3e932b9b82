"""GEMM with SwiGLU in its epilogue: the gate and up projections of an MLP, and their product."""

from smkern.ops.swiglu.explain import explain_gemm_swiglu, gemm_swiglu_workspace_bytes
from smkern.ops.swiglu.operator import gemm_swiglu
from smkern.ops.swiglu.warmup import SwigluCalls

__all__ = ["SwigluCalls", "explain_gemm_swiglu", "gemm_swiglu", "gemm_swiglu_workspace_bytes"]
