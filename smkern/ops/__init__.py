"""The public operators: validate, look up a configuration, launch."""

from smkern.ops.explain import explain_gemm, gemm_workspace_bytes
from smkern.ops.gemm import gemm
from smkern.ops.warmup import WarmupReport, warmup

__all__ = ["WarmupReport", "explain_gemm", "gemm", "gemm_workspace_bytes", "warmup"]
