"""Mixture of experts: routing, rows sorted by expert, grouped GEMM with SwiGLU, weighted sum."""

from smkern.ops.moe.grouped import grouped_gemm
from smkern.ops.moe.permute import moe_permute
from smkern.ops.moe.route import topk_softmax
from smkern.ops.moe.unpermute import moe_unpermute

__all__ = ["grouped_gemm", "moe_permute", "moe_unpermute", "topk_softmax"]
