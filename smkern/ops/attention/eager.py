"""The eager path of attention on one device: a dictionary look-up, then the launch.

All that a call's sizes, strides, dtypes, devices and budget imply is checked and prepared once and
kept under a key of those numbers. Overlap with an `out` is looked at in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.kernels.attention.args import ALIGNMENT, AttentionArguments, WorkspaceLayout
from smkern.kernels.attention.items import PlanLayout
from smkern.kernels.attention.triton_launch import is_aligned
from smkern.ops import checks
from smkern.ops.aliasing import layout as kind
from smkern.ops.aliasing import pointer, span_bytes
from smkern.ops.attention import aliasing, check
from smkern.ops.attention.call import Call, check_call, problem_of
from smkern.ops.attention.dispatch import (
    AttentionDispatcher,
    Launch,
    PlanLaunch,
    load_attention_dispatcher,
)
from smkern.ops.attention.plan import (
    Plan,
    PlanNumbers,
    check_place,
    check_refill,
    empty_plan,
    shape_of_plan,
)
from smkern.ops.bounded_cache import keep
from smkern.ops.streams import Streams, runtime_streams
from smkern.tuning.attention.shapes import AttentionShape, Budget


@dataclass(frozen=True, slots=True)
class Record:
    """A validated combination of numbers with its launch; `launch` is None where nothing runs.

    `spans` are bytes from a tensor's first element to behind its last, of `out`, `lse` and then of
    what is read, in the order of `_read`. `tail` is what `AttentionArguments` holds behind the
    addresses. `make_plan`, `plan_bytes` and `workspace_at` are for a call without a plan, which
    makes one in memory of its own.
    """

    shape: AttentionShape
    launch: Launch | None
    spans: tuple[int, ...]
    tail: tuple[Any, ...]
    make_plan: PlanLaunch | None
    plan_bytes: int
    workspace_at: int


class EagerAttention:
    """Plans and launches attention on one device.

    Args:
        index: The device's index.
        dispatcher: Chooses and prepares launches.
        streams: The current stream and its budget.
    """

    def __init__(self, index: int, dispatcher: AttentionDispatcher, streams: Streams) -> None:
        self.index = index
        self.dispatcher = dispatcher
        self.streams = streams
        self._current_device = streams.current_device
        self._current_stream = streams.current_stream
        self._budget = streams.budget
        self._records: dict[Any, Record] = {}
        self._plans: dict[Any, tuple[AttentionShape, Budget, PlanLaunch | None]] = {}

    def __call__(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Run a call: (out, lse), lse being None where nobody asked for it."""
        index = self.index
        if self._current_device() != index:
            with torch.cuda.device(index):
                return self(call)
        stream = self._current_stream(index)
        budget = self._budget(stream, index)
        q, k_cache, v_cache, plan = call.q, call.k_cache, call.v_cache, call.plan
        out, lse = call.out, call.lse
        plan_key, plan_ptr, workspace_ptr = None, 0, 0
        if plan is not None:
            if plan.__class__ is not Plan:
                check_call(call)
            plan_key = (plan.shape, plan.budget.num_sms, plan.buffer.get_device())
            plan_ptr, workspace_ptr = plan.buffer.data_ptr(), plan.workspace.data_ptr()
        q_ptr, k_ptr, v_ptr = q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()
        out_ptr, lse_ptr = pointer(out), pointer(lse)
        key = (
            q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), k_cache.dtype,
            k_cache.get_device(), v_cache.shape, v_cache.stride(), v_cache.dtype,
            v_cache.get_device(), kind(call.page_table), kind(call.kv_lens),
            kind(call.page_indptr), kind(call.cu_q_lens), call.max_q_len, call.causal,
            call.scale, call.window, call.softcap, kind(call.sinks), kind(call.k_scale),
            kind(call.v_scale), plan_key, kind(out), kind(lse),
            call.backend, call.num_sms, call.num_sms.__class__, budget.num_sms, budget.confined,
            budget.clusters, (q_ptr & 15, (k_ptr | v_ptr) & 31, out_ptr & 15),
        )  # fmt: skip
        try:
            record = self._records.get(key)
        except TypeError:
            record = None
        if record is None:
            record = self._prepare(key, call, budget)
        if call.check:
            self._refuse_in_capture()
            check.check_memory(call, record.shape)
        lens_ptr, cu_ptr = call.kv_lens.data_ptr(), pointer(call.cu_q_lens)
        others = (
            call.page_table.data_ptr(), pointer(call.page_indptr), pointer(call.sinks),
            pointer(call.k_scale), pointer(call.v_scale), plan_ptr, workspace_ptr,
        )  # fmt: skip
        if out_ptr or lse_ptr:
            pointers = (out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, lens_ptr, cu_ptr, *others)
            if _may_meet(pointers, record.spans):
                check_aliases(call)
        if out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if lse is None and call.return_lse:
            lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        launch = record.launch
        if launch is None:
            return out, lse
        tensors = (q_ptr, k_ptr, v_ptr, out.data_ptr(), pointer(lse), *others[:-2])
        if plan is not None:
            launch(AttentionArguments(*tensors, plan_ptr, workspace_ptr, *record.tail), stream)
            return out, lse
        # of the stream's pool: freed on return, and reused only behind this launch
        room = q.new_empty(record.plan_bytes, dtype=torch.uint8)
        plan_ptr = -(-room.data_ptr() // ALIGNMENT) * ALIGNMENT
        workspace_ptr = plan_ptr + record.workspace_at
        assert record.make_plan is not None
        record.make_plan(lens_ptr, cu_ptr, plan_ptr, workspace_ptr, stream)
        launch(AttentionArguments(*tensors, plan_ptr, workspace_ptr, *record.tail), stream)
        return out, lse

    def plan(
        self, kv_lens: Tensor, cu_q_lens: Tensor | None, given: PlanNumbers, out: Plan | None,
        check_it: bool, num_sms: Any,
    ) -> Plan:  # fmt: skip
        """Make a plan, or `out` anew."""
        index = self.index
        if self._current_device() != index:
            with torch.cuda.device(index):
                return self.plan(kv_lens, cu_q_lens, given, out, check_it, num_sms)
        stream = self._current_stream(index)
        own = self._budget(stream, index)
        key = (kind(kv_lens), kind(cu_q_lens), given, num_sms, num_sms.__class__, own)
        try:
            found = self._plans.get(key)
        except TypeError:
            found = None
        if found is None:
            found = self._prepare_plan(key, kv_lens, cu_q_lens, given, num_sms, own)
        shape, budget, launch = found
        if out is None:
            made = empty_plan(shape, budget, kv_lens.device)
        else:
            made = out
            if out.__class__ is not Plan or out.shape is not shape or out.budget is not budget:
                check_refill(out, shape, budget, kv_lens.device)
        if check_it:
            self._refuse_in_capture()
            check.check_lengths(kv_lens, cu_q_lens, shape)
        if launch is None:
            made.buffer.zero_()
        else:
            launch(
                kv_lens.data_ptr(), pointer(cu_q_lens), made.buffer.data_ptr(),
                made.workspace.data_ptr(), stream,
            )  # fmt: skip
        if check_it:
            check.check_plan(made)
        return made

    def stream_budget(self) -> Budget:
        """What the current stream has."""
        return self._budget(self._current_stream(self.index), self.index)

    def _prepare(self, key: Any, call: Call, stream_budget: Budget) -> Record:
        """Validate a combination of numbers and prepare its launch; keep it."""
        shape = check_call(call)
        info = self.dispatcher.profile.info
        checks.check_capability(call.q.device, info.capability)
        budget = checks.resolve_budget(call.num_sms, stream_budget, info.num_sms)
        if call.plan is not None:
            check_place(call.plan, budget, call.q.device, "plan")
        capturing = self.streams.capturing()
        problem = problem_of(call, shape)
        launch, make_plan = None, None
        tail = tail_of(call)
        if shape.batch and call.q.shape[0]:
            absent: list[Any] = [0] * 8
            some = AttentionArguments(
                call.q.data_ptr(), call.k_cache.data_ptr(), call.v_cache.data_ptr(),
                pointer(call.out), *absent, *tail,
            )  # fmt: skip
            config = self.dispatcher.config(problem, budget, call.backend, some)
            launch = self.dispatcher.launch(
                problem, config, budget, capturing=capturing, aligned=is_aligned(some, problem)
            )
            if call.plan is None:
                make_plan = self.dispatcher.plan(shape, budget, capturing=capturing)
        workspace_at = -(-4 * PlanLayout.of(shape).words // ALIGNMENT) * ALIGNMENT
        record = Record(
            shape=shape,
            launch=launch,
            spans=spans_of(call),
            tail=tail,
            make_plan=make_plan,
            plan_bytes=workspace_at + WorkspaceLayout.of(shape).num_bytes + ALIGNMENT,
            workspace_at=workspace_at,
        )
        keep(self._records, key, record)
        return record

    def _prepare_plan(
        self, key: Any, kv_lens: Any, cu_q_lens: Any, given: PlanNumbers, num_sms: Any, own: Budget
    ) -> tuple[AttentionShape, Budget, PlanLaunch | None]:
        shape = shape_of_plan(kv_lens, cu_q_lens, given)
        budget = checks.resolve_budget(num_sms, own, self.dispatcher.profile.info.num_sms)
        launch = None
        if shape.batch:
            launch = self.dispatcher.plan(shape, budget, capturing=self.streams.capturing())
        keep(self._plans, key, (shape, budget, launch))
        return shape, budget, launch

    def _refuse_in_capture(self) -> None:
        if self.streams.capturing():
            raise ArgumentError(
                "check=True reads device memory, which a graph capture cannot: leave check at "
                "False there"
            )


def _read(call: Call) -> dict[str, Tensor | None]:
    """What a launch reads or keeps partial results in, by name."""
    names = ("q", "k_cache", "v_cache", "kv_lens", "cu_q_lens", "page_table", "page_indptr",
             "sinks", "k_scale", "v_scale")  # fmt: skip
    given = {name: getattr(call, name) for name in names}
    read = {name: x if isinstance(x, Tensor) else None for name, x in given.items()}
    buffers = (None, None) if call.plan is None else (call.plan.buffer, call.plan.workspace)
    return read | dict(zip(("plan.buffer", "plan.workspace"), buffers, strict=True))


def check_aliases(call: Call) -> None:
    """Raise ArgumentError where `out` or `lse` shares memory with anything else of a call."""
    aliasing.check_overlap({"out": call.out, "lse": call.lse}, _read(call))


def spans_of(call: Call) -> tuple[int, ...]:
    """Bytes that the tensors of a call span: `out`, `lse` and those of `_read`."""
    return tuple(span_bytes(x) for x in (call.out, call.lse, *_read(call).values()))


def _may_meet(pointers: tuple[int, ...], spans: tuple[int, ...]) -> bool:
    """Whether the span of one of the first two may share an address with one behind it."""
    for at in (0, 1):
        begin = pointers[at]
        end = begin + spans[at]
        for other, length in zip(pointers[at + 1 :], spans[at + 1 :], strict=True):
            if other < end and begin < other + length:
                return True
    return False


def tail_of(call: Call) -> tuple[Any, ...]:
    """`AttentionArguments` behind the addresses."""
    q, k, v, table = call.q, call.k_cache, call.v_cache, call.page_table
    tokens, heads, dim = q.shape
    out = (heads * dim, dim) if call.out is None else _strides(call.out)
    k_scale, v_scale = (
        1.0 if x is None or isinstance(x, Tensor) else float(x)
        for x in (call.k_scale, call.v_scale)
    )
    return (
        _strides(q), out, _strides(k), _strides(v),
        0 if call.page_indptr is not None else table.stride(0), table.shape[-1], k.shape[0],
        tokens, dim**-0.5 if call.scale is None else float(call.scale),
        0.0 if call.softcap is None else float(call.softcap), k_scale, v_scale,
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, ...]:
    """Strides but the inner one; dense ones where nothing is stepped over: torch leaves any."""
    found, dense = [], x.shape[-1]
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        found.append(stride if size > 1 else dense)
        dense = found[-1] * max(size, 1)
    return tuple(reversed(found))


@cache
def eager_attention(index: int) -> EagerAttention:
    """The eager path of a device, made at its first attention and kept for the process."""
    return EagerAttention(index, load_attention_dispatcher(index), runtime_streams())
