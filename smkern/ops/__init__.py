"""The public operators: validate, look up a configuration, launch."""

from smkern.ops.append import append_kv, qk_norm_rope_append
from smkern.ops.append.warmup import AppendCalls
from smkern.ops.attention import (
    AttentionCalls,
    Plan,
    explain_attention,
    merge_states,
    paged_attention,
    plan_attention,
)
from smkern.ops.fp8 import Fp8Calls, quantize
from smkern.ops.gemm import gemm
from smkern.ops.gemm.explain import explain_gemm, gemm_workspace_bytes
from smkern.ops.moe import grouped_gemm, moe_permute, moe_unpermute, topk_softmax
from smkern.ops.moe.warmup import MoeCalls
from smkern.ops.rows import RowsCalls, add_rms_norm, embedding, rms_norm, silu_and_mul
from smkern.ops.sample import SampleCalls, sample
from smkern.ops.swiglu import (
    SwigluCalls,
    explain_gemm_swiglu,
    gemm_swiglu,
    gemm_swiglu_workspace_bytes,
)
from smkern.ops.warmup import WarmupReport, warmup
from smkern.rope import Linear, Llama3, Rope, Yarn

__all__ = [
    "AppendCalls",
    "AttentionCalls",
    "Fp8Calls",
    "Linear",
    "Llama3",
    "MoeCalls",
    "Plan",
    "Rope",
    "RowsCalls",
    "SampleCalls",
    "SwigluCalls",
    "WarmupReport",
    "Yarn",
    "add_rms_norm",
    "append_kv",
    "embedding",
    "explain_attention",
    "explain_gemm",
    "explain_gemm_swiglu",
    "gemm",
    "gemm_swiglu",
    "gemm_swiglu_workspace_bytes",
    "gemm_workspace_bytes",
    "grouped_gemm",
    "merge_states",
    "moe_permute",
    "moe_unpermute",
    "paged_attention",
    "plan_attention",
    "qk_norm_rope_append",
    "quantize",
    "rms_norm",
    "sample",
    "silu_and_mul",
    "topk_softmax",
    "warmup",
]
