"""A layer of Qwen3-8B launched eagerly on a driver that does nothing: the host's own work is left.

All of smkern is real but what the driver and the compilers do, so a call does on a CPU what it does
on a GPU machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from smkern.device import Budget
from smkern.kernels import (
    aot,
    append_launch,
    cuda_source,
    driver,
    gemm_frame,
    gemm_launch,
    rows_launch,
)
from smkern.kernels.append_launch import AppendKernels
from smkern.kernels.attention import cuda, maps, triton_compile
from smkern.kernels.attention.launch import AttentionKernels
from smkern.kernels.compile import Artifact
from smkern.kernels.gemm_launch import GemmKernels
from smkern.kernels.rows_launch import RowsKernels
from smkern.models import ActivationBuffers, preset
from smkern.models.layers import empty_layer
from smkern.ops.append.call import Call as AppendCall
from smkern.ops.append.dispatch import of_step as append_of_step
from smkern.ops.append.operators import APPEND
from smkern.ops.attention.call import Call as AttentionCall
from smkern.ops.attention.dispatch import AttentionDispatcher
from smkern.ops.attention.paged import ATTENTION
from smkern.ops.attention.plan import PlanNumbers
from smkern.ops.attention.plan_eager import EagerPlans
from smkern.ops.gemm.call import Gemm
from smkern.ops.gemm.dispatch import Dispatcher
from smkern.ops.gemm.operator import GEMM
from smkern.ops.operator_dispatch import OperatorDispatcher
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.rows.call import RmsNorm
from smkern.ops.rows.dispatch import of_step
from smkern.ops.rows.operators import RMS_NORM
from smkern.ops.streams import Streams
from smkern.ops.swiglu.operator import GEMM_SWIGLU, Swiglu
from smkern.ops.swiglu.unfused import RowsSilu
from smkern.ops.workspace import Workspaces
from smkern.profile import load_profile
from smkern.tuning.append import APPEND_FAMILY
from smkern.tuning.attention.select import ATTENTION_FAMILY, select_attention
from smkern.tuning.cost_constants import load_constants
from smkern.tuning.rows import choose
from smkern.tuning.select import GEMM_FAMILY

CAPABILITY = 90
MAX_M, PAGE = 8192, 16
_ADDRESSES = 1 << 40
_DONE = lambda *_: 0  # noqa: E731


class Launched(NamedTuple):
    """A launch as the driver sees it: its grid, and the first 8 bytes of each parameter.

    Those of a tensor map are a hash of its sizes; addresses are None.
    """

    num_ctas: int
    shared_bytes: int
    values: tuple[int | None, ...]


@contextmanager
def without_driver(launched: list[Launched] | None = None) -> Iterator[None]:
    """Kernels compile to nothing, load at once, and their launches succeed, noted if asked."""
    lib = SimpleNamespace(
        cuModuleLoadData=_DONE,
        cuModuleGetFunction=_load,
        cuFuncSetAttribute=_DONE,
        cuTensorMapEncodeTiled=_encode,
    )

    def plain(_: Any, num_ctas: int, *rest: Any) -> int:
        if launched is not None:
            launched.append(Launched(num_ctas, rest[5], _values(rest[7])))
        return 0

    def overlapping(config: Any, _: Any, params: Any, __: Any) -> int:
        if launched is not None:
            found = config._obj
            launched.append(Launched(found.grid[0], found.shared_bytes, _values(params)))
        return 0

    fakes: tuple[tuple[Any, str, Any], ...] = (
        (driver, "libcuda", lambda: lib),
        (driver, "launch_kernel", lambda: plain),
        (driver, "_launch_kernel_ex", lambda: overlapping),
        (aot, "replace_address", lambda: _DONE),
        (gemm_frame, "replace_address", lambda: _DONE),
        (maps, "replace_address", lambda: _DONE),
        (gemm_launch, "compile_variant", _artifact),
        (append_launch, "compile_append", _artifact),
        (rows_launch, "compile_source", _artifact),
        (triton_compile, "compile_source", _artifact),
        (cuda, "compile_cuda", lambda *_: b""),
        (cuda_source, "compile_cuda", lambda *_: b""),
    )
    with ExitStack() as stack:
        for owner, name, fake in fakes:
            stack.enter_context(patch.object(owner, name, fake))
        yield


def _values(params: Any) -> tuple[int | None, ...]:
    found = (ctypes.c_uint64.from_address(at).value for at in params)
    return tuple(value if value < _ADDRESSES else None for value in found)


def _encode(at: Any, dtype: Any, rank: Any, base: Any, *sizes: Any) -> int:
    """Leave a hash of a tensor map's sizes where it would be."""
    numbers = (tuple(x) if hasattr(x, "__len__") else x.value for x in sizes)
    ctypes.c_uint64.from_address(at.value).value = hash(tuple(numbers)) % _ADDRESSES
    return 0


def _load(function: Any, *_: Any) -> int:
    function._obj.value = 1
    return 0


def _artifact(variant: Any) -> Artifact:
    boxes: tuple[tuple[int, ...], ...] = ()
    if getattr(variant, "uses_tma", False):
        sides = [(variant.block_x, variant.block_k), (variant.block_y, variant.block_k)]
        if variant.interleaves:
            sides[0 if variant.swap else 1] = (8, 2, 8, variant.block_k)  # type: ignore[assignment]
        boxes = tuple(sides)
    return Artifact("kernel", b"", 128, 0, (3, 3), boxes)


class FakeLayer:
    """The eager paths of one device and a layer's calls, by name, for any number of tokens.

    Args:
        num_sms: SMs of the partition that it runs on.
    """

    def __init__(self, num_sms: int = 92) -> None:
        self.config = preset("qwen3-8b")
        profile = load_profile("h200")
        budget = Budget(num_sms, "mask", True)
        streams = Streams(lambda: -1, lambda index: 7, lambda raw, index: budget, lambda: False)
        space = Workspaces(torch.device("cpu"), streams.capturing, lambda raw: 0)
        rows: Any = OperatorDispatcher(
            profile, lambda: RowsKernels(CAPABILITY), partial(choose, profile=profile), of_step
        )
        gemms = Dispatcher(
            profile, GEMM_FAMILY.load(profile), lambda: GemmKernels(0, CAPABILITY), _no_library,
            load_constants(profile.info.name), lambda: RowsSilu(rows),
        )  # fmt: skip
        self.gemm = EagerOperator(GEMM, -1, gemms, streams, space)
        self.swiglu = EagerOperator(GEMM_SWIGLU, -1, gemms, streams, space)
        self.norm = EagerOperator(RMS_NORM, -1, rows, streams, space)
        append_table = APPEND_FAMILY.load(profile)
        appends: Any = OperatorDispatcher(
            profile,
            lambda: AppendKernels(CAPABILITY),
            lambda p, where: APPEND_FAMILY.select(p, where, profile, append_table).config,
            append_of_step,
        )
        self.append = EagerOperator(APPEND, -1, appends, streams)
        attentions = AttentionDispatcher(
            profile, lambda: AttentionKernels(CAPABILITY), select_attention, cuda.violations,
            ATTENTION_FAMILY.load(profile),
        )  # fmt: skip
        self.attention = EagerOperator(ATTENTION, -1, attentions, streams)
        self.plans = EagerPlans(-1, attentions, streams)
        self.weights: Any = empty_layer(
            self.config, lambda *shape, dtype: torch.empty(shape, dtype=dtype)
        )
        self.activations = ActivationBuffers(self.config, MAX_M, 1)
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        pages = torch.empty(2, MAX_M // PAGE, PAGE, heads, dim, dtype=torch.bfloat16)
        self.k_cache, self.v_cache = pages
        self.table = torch.zeros(1, MAX_M // PAGE, dtype=torch.int32)
        self.lens = torch.zeros(1, dtype=torch.int32)
        self.starts = torch.zeros(2, dtype=torch.int32)
        self.cos_sin = torch.zeros(MAX_M, dim)

    def calls(self, m: int) -> dict[str, Callable[[], Any]]:
        """The plan of a prompt of `m` tokens and the eight launches of its first layer."""
        b, w, c = self.activations.buffers(m, 1), self.weights, self.config
        numbers = PlanNumbers(
            c.num_q_heads, c.num_kv_heads, c.head_dim, PAGE, m, m, True, None, m, None
        )
        plans: list[Any] = []

        def attend() -> Any:
            given = dict.fromkeys(AttentionCall._fields) | {
                "q": b.q, "k_cache": self.k_cache, "v_cache": self.v_cache,
                "page_table": self.table, "kv_lens": self.lens, "cu_q_lens": self.starts,
                "max_q_len": m, "causal": True, "plan": plans[0], "out": b.attended,
                "return_lse": False, "check": False,
            }  # fmt: skip
            return self.attention(AttentionCall(**given))

        def append() -> Any:
            return self.append(AppendCall(
                b.q, b.k, b.v, self.k_cache, self.v_cache, self.table, self.lens, self.cos_sin,
                q_norm=w.q_norm, k_norm=w.k_norm, eps=1e-6, cu_q_lens=self.starts, out=b.q,
            ))  # fmt: skip

        def product(a: Any, weight: Any, out: Any, residual: Any = None) -> Any:
            given = {"out": out, "residual": residual, "static_weights": True}
            return lambda: self.gemm(Gemm(a, weight, **given))

        def gate_up() -> Any:
            return self.swiglu(Swiglu(b.normed, w.gate_up, static_weights=True, out=b.gated))

        def norm(weight: Any) -> Any:
            return lambda: self.norm(RmsNorm(b.hidden, weight, 1e-6, b.normed))

        return {
            "plan": lambda: plans.append(
                self.plans.plan(self.lens, self.starts, numbers, None, False, None)
            ),
            "input_norm": norm(w.input_norm),
            "qkv": product(b.normed, w.qkv, b.qkv),
            "append": append,
            "attention": attend,
            "o": product(b.attended_rows, w.o, b.hidden, b.hidden),
            "post_norm": norm(w.post_norm),
            "gate_up": gate_up,
            "down": product(b.gated, w.down, b.hidden, b.hidden),
        }


def _no_library() -> Any:
    class Library:
        def plan(self, problem: Any, budget: Any) -> Any:
            nothing: Any = lambda *_: None  # noqa: E731
            return SimpleNamespace(workspace_bytes=0, launch=nothing, bind=lambda *a, **k: nothing)

    return Library()
