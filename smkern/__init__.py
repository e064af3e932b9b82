"""SM partitions for LLM serving, and kernels that know how many SMs they have.

Importing smkern loads neither torch nor Triton nor the driver; a public name does when it is
first used.

>>> import smkern
>>> ladder = smkern.ladder()                    # doctest: +SKIP
>>> with ladder.split(decode=32).prefill:       # doctest: +SKIP
...     y = smkern.gemm(x, w)                   # on the 100 SMs of this partition
>>> policy = smkern.policies.FixedSplit(32)
>>> mux = smkern.serve(decoder, pool, ladder=ladder, policy=policy)     # doctest: +SKIP
"""

from __future__ import annotations

import os.path
from importlib import import_module
from typing import TYPE_CHECKING, Any

from smkern import errors

if TYPE_CHECKING:
    from smkern import kv, latency, models, policies, runtime
    from smkern.device import DeviceInfo, device_info
    from smkern.kernels import counters
    from smkern.ops import (
        AppendCalls,
        AttentionCalls,
        MoeCalls,
        Plan,
        SampleCalls,
        SwigluCalls,
        append_kv,
        explain_attention,
        explain_gemm,
        explain_gemm_swiglu,
        gemm,
        gemm_swiglu,
        gemm_swiglu_workspace_bytes,
        gemm_workspace_bytes,
        grouped_gemm,
        merge_states,
        moe_permute,
        moe_unpermute,
        paged_attention,
        plan_attention,
        qk_norm_rope_append,
        rms_norm,
        sample,
        silu_and_mul,
        topk_softmax,
        warmup,
    )
    from smkern.partition import (
        Ladder,
        LadderPlan,
        Partition,
        Split,
        current_num_sms,
        ladder,
        plan_ladder,
        split,
    )
    from smkern.profile import Profile, load_profile
    from smkern.runtime import (
        CudaDevice,
        Handle,
        HostDevice,
        Interleaver,
        ModelExecutor,
        Multiplexer,
        Output,
        SimDevice,
        SimExecutor,
        Timeline,
        Work,
        serve,
    )

__version__ = "0.1.0"

__all__ = [
    "ladder",
    "split",
    "Ladder",
    "LadderPlan",
    "plan_ladder",
    "Split",
    "Partition",
    "current_num_sms",
    "gemm",
    "gemm_workspace_bytes",
    "explain_gemm",
    "gemm_swiglu",
    "gemm_swiglu_workspace_bytes",
    "explain_gemm_swiglu",
    "explain_attention",
    "paged_attention",
    "plan_attention",
    "Plan",
    "merge_states",
    "qk_norm_rope_append",
    "append_kv",
    "rms_norm",
    "add_rms_norm",
    "silu_and_mul",
    "embedding",
    "topk_softmax",
    "moe_permute",
    "grouped_gemm",
    "moe_unpermute",
    "sample",
    "warmup",
    "AttentionCalls",
    "AppendCalls",
    "MoeCalls",
    "RowsCalls",
    "SampleCalls",
    "SwigluCalls",
    "serve",
    "Multiplexer",
    "Handle",
    "Output",
    "Timeline",
    "ModelExecutor",
    "SimExecutor",
    "Interleaver",
    "Work",
    "CudaDevice",
    "HostDevice",
    "SimDevice",
    "counters",
    "device_info",
    "load_profile",
    "DeviceInfo",
    "Profile",
    "errors",
    "kv",
    "latency",
    "models",
    "policies",
    "runtime",
    "__version__",
]

_ROOMS = {
    "smkern.partition": (
        "ladder",
        "plan_ladder",
        "split",
        "Ladder",
        "LadderPlan",
        "Split",
        "Partition",
        "current_num_sms",
    ),
    "smkern.ops": (
        "gemm",
        "gemm_workspace_bytes",
        "explain_gemm",
        "gemm_swiglu",
        "gemm_swiglu_workspace_bytes",
        "explain_gemm_swiglu",
        "explain_attention",
        "paged_attention",
        "plan_attention",
        "Plan",
        "merge_states",
        "qk_norm_rope_append",
        "append_kv",
        "rms_norm",
        "add_rms_norm",
        "silu_and_mul",
        "embedding",
        "topk_softmax",
        "moe_permute",
        "grouped_gemm",
        "moe_unpermute",
        "sample",
        "warmup",
        "AttentionCalls",
        "AppendCalls",
        "MoeCalls",
        "RowsCalls",
        "SampleCalls",
        "SwigluCalls",
    ),
    "smkern.runtime": (
        "serve",
        "Multiplexer",
        "Handle",
        "Output",
        "Timeline",
        "ModelExecutor",
        "SimExecutor",
        "Interleaver",
        "Work",
        "CudaDevice",
        "HostDevice",
        "SimDevice",
    ),
    "smkern.kernels": ("counters",),
    "smkern.device": ("device_info", "DeviceInfo"),
    "smkern.profile": ("load_profile", "Profile"),
}
_LAZY = ("kv", "latency", "models", "policies", "runtime")
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported from its room when it is first asked for; or a room."""
    if name in _LAZY:
        return import_module(f"smkern.{name}")
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'smkern' has no attribute {name!r}")
    value = getattr(import_module(_ROOM_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _checkout_root() -> str | None:
    """The checkout this package is imported from, or None where it is installed."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    marks = ("pyproject.toml", "autotune", "bench")
    return root if all(os.path.exists(os.path.join(root, mark)) for mark in marks) else None


# autotune/ and bench/ install as smkern.autotune and smkern.bench; in a checkout they lie beside
# smkern/, where Python finds them once the root is on the package's path.
if _root := _checkout_root():
    __path__.append(_root)
