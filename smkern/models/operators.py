"""The operators that a decoder is made of."""

from smkern.ops import (
    embedding,
    gemm,
    gemm_swiglu,
    grouped_gemm,
    moe_permute,
    moe_unpermute,
    paged_attention,
    plan_attention,
    qk_norm_rope_append,
    rms_norm,
    sample,
    topk_softmax,
)

__all__ = [
    "embedding",
    "gemm",
    "gemm_swiglu",
    "grouped_gemm",
    "moe_permute",
    "moe_unpermute",
    "paged_attention",
    "plan_attention",
    "qk_norm_rope_append",
    "rms_norm",
    "sample",
    "topk_softmax",
]
