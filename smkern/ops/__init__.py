"""The public operators: validate, look up a configuration, launch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smkern.ops.attention import (
    Plan,
    explain_attention,
    merge_states,
    paged_attention,
    plan_attention,
)
from smkern.ops.explain import explain_gemm, gemm_workspace_bytes
from smkern.ops.gemm import gemm
from smkern.ops.warmup import WarmupReport, warmup

if TYPE_CHECKING:
    from smkern.ops.append import append_kv, qk_norm_rope_append

__all__ = [
    "Plan",
    "WarmupReport",
    "append_kv",
    "explain_attention",
    "explain_gemm",
    "gemm",
    "gemm_workspace_bytes",
    "merge_states",
    "paged_attention",
    "plan_attention",
    "qk_norm_rope_append",
    "warmup",
]

_LATER = ("append_kv", "qk_norm_rope_append")


def __getattr__(name: str) -> Any:
    """An operator that is imported when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module 'smkern.ops' has no attribute {name!r}")
    value = getattr(import_module("smkern.ops.append"), name)
    globals()[name] = value
    return value
