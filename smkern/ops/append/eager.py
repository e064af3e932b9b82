"""The eager path of the append on one device, and its CPU twin.

All that a call's sizes, strides, dtypes, devices and budget imply is checked and prepared once and
kept under a key of those numbers. Overlap of what is written is looked at in every call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.kernels.append_launch import AppendArguments
from smkern.ops import checks
from smkern.ops.aliasing import layout as kind
from smkern.ops.aliasing import pointer
from smkern.ops.append import aliasing
from smkern.ops.append.call import Call, check_call, is_aligned, problem_of
from smkern.ops.append.check import check_memory
from smkern.ops.append.dispatch import AppendDispatcher, Launch, load_append_dispatcher
from smkern.ops.attention.host import host_budget
from smkern.ops.bounded_cache import MAX_CACHED, keep
from smkern.ops.reference import append as reference
from smkern.ops.streams import Streams, runtime_streams


@dataclass(frozen=True, slots=True)
class Record:
    """A validated combination of numbers with its launch; `launch` is None where nothing runs.

    `spans` are those of `aliasing.spans_of`, `tail` is what `AppendArguments` holds behind the
    addresses, `apart` are pairs of `aliasing.meeting` that share no address all the same.
    """

    launch: Launch | None
    spans: tuple[int, ...]
    tail: tuple[Any, ...]
    apart: set[tuple[int, int, int]] = field(default_factory=set)


class EagerAppend:
    """Launches appends on one device.

    Args:
        index: The device's index.
        dispatcher: Chooses and prepares launches.
        streams: The current stream and its budget.
    """

    def __init__(self, index: int, dispatcher: AppendDispatcher, streams: Streams) -> None:
        self.index = index
        self.dispatcher = dispatcher
        self.streams = streams
        self._records: dict[Any, Record] = {}

    def __call__(self, call: Call) -> Tensor | None:
        """Run a call: q's result, None for a plain append."""
        index, streams = self.index, self.streams
        if streams.current_device() != index:
            with torch.cuda.device(index):
                return self(call)
        stream = streams.current_stream(index)
        budget = streams.budget(stream, index)
        q, k, v, k_cache, v_cache = call[:5]
        out = call.out
        q_ptr, k_ptr, v_ptr = pointer(q), k.data_ptr(), v.data_ptr()
        k_cache_ptr, v_cache_ptr = k_cache.data_ptr(), v_cache.data_ptr()
        out_ptr, cos_ptr = pointer(out), pointer(call.cos_sin)
        norms = pointer(call.q_norm), pointer(call.k_norm)
        others = (
            call.page_table.data_ptr(), pointer(call.page_indptr), call.kv_lens.data_ptr(),
            pointer(call.cu_q_lens), pointer(call.positions),
        )  # fmt: skip
        scales = pointer(call.k_scale), pointer(call.v_scale)
        low = q_ptr | k_ptr | v_ptr | k_cache_ptr | v_cache_ptr | out_ptr | cos_ptr
        key = (
            kind(q), k.shape, k.stride(), k.dtype, k.get_device(), kind(v), kind(k_cache),
            kind(v_cache), kind(call.page_table), kind(call.kv_lens), kind(call.cos_sin),
            call.interleaved, kind(call.q_norm), kind(call.k_norm), call.eps,
            kind(call.positions), kind(call.page_indptr), kind(call.cu_q_lens),
            kind(call.k_scale), kind(call.v_scale), kind(out), call.num_sms,
            call.num_sms.__class__, budget.num_sms, budget.confined, budget.clusters,
            (low | norms[0] | norms[1]) & 15,
        )  # fmt: skip
        try:
            record = self._records.get(key)
        except TypeError:
            record = None
        if record is None:
            record = self._prepare(key, call, budget)
        pointers = (
            out_ptr, k_cache_ptr, v_cache_ptr, q_ptr, k_ptr, v_ptr, others[0], others[2], cos_ptr,
            *norms, others[4], others[1], others[3], *scales,
        )  # fmt: skip
        in_place = out_ptr == q_ptr and aliasing.is_in_place(call)
        pairs = aliasing.meeting(pointers, record.spans, in_place)
        if pairs and not record.apart.issuperset(pairs):
            aliasing.check_pairs(call, pairs)
            if len(record.apart) >= MAX_CACHED:
                record.apart.clear()
            record.apart.update(pairs)
        if call.check:
            self._refuse_in_capture()
            check_memory(call)
        if q is not None and out is None:
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            out_ptr = out.data_ptr()
        if record.launch is not None:
            arguments = AppendArguments(
                q_ptr, k_ptr, v_ptr, out_ptr, k_cache_ptr, v_cache_ptr, *others, cos_ptr, *norms,
                *scales, *record.tail,
            )  # fmt: skip
            record.launch(arguments, stream)
        return out

    def _prepare(self, key: Any, call: Call, stream_budget: Any) -> Record:
        """Validate a combination of numbers and prepare its launch; keep it."""
        batch = check_call(call)
        info = self.dispatcher.profile.info
        checks.check_capability(call.k.device, info.capability)
        budget = checks.resolve_budget(call.num_sms, stream_budget, info.num_sms)
        launch = None
        if batch and call.k.shape[0]:
            problem = problem_of(call, batch, aligned=is_aligned(call))
            launch = self.dispatcher.launch(problem, budget, capturing=self.streams.capturing())
        record = Record(launch, aliasing.spans_of(call), tail_of(call))
        keep(self._records, key, record)
        return record

    def _refuse_in_capture(self) -> None:
        if self.streams.capturing():
            raise ArgumentError(
                "check=True reads device memory, which a graph capture cannot: leave check at "
                "False there"
            )


def tail_of(call: Call) -> tuple[Any, ...]:
    """`AppendArguments` behind the addresses."""
    k, v, table = call.k, call.v, call.page_table
    q_strides = out = (0, 0)
    if call.q is not None:
        _, heads, dim = call.q.shape
        q_strides = call.q.stride()[:2]
        out = (heads * dim, dim) if call.out is None else call.out.stride()[:2]
    scales = (
        1.0 if x is None or isinstance(x, Tensor) else float(x)
        for x in (call.k_scale, call.v_scale)
    )
    cos_sin, positions = call.cos_sin, call.positions
    return (
        q_strides, k.stride()[:2], v.stride()[:2], out, call.k_cache.stride()[:3],
        call.v_cache.stride()[:3], 0 if call.page_indptr is not None else table.stride(0),
        0 if cos_sin is None else cos_sin.stride(0), table.shape[-1], call.k_cache.shape[0],
        1 if cos_sin is None else cos_sin.shape[0],
        0 if positions is None else positions.element_size() // 4, float(call.eps), *scales,
    )  # fmt: skip


def arguments_of(call: Call) -> AppendArguments:
    """What a launch of a checked call is given; with a q there is an `out`."""
    names = ("q", "k", "v", "out", "k_cache", "v_cache", "page_table", "page_indptr", "kv_lens",
             "cu_q_lens", "positions", "cos_sin", "q_norm", "k_norm", "k_scale",
             "v_scale")  # fmt: skip
    addresses: tuple[Any, ...] = tuple(pointer(getattr(call, name)) for name in names)
    return AppendArguments(*addresses, *tail_of(call))


def append_cpu(call: Call) -> Tensor | None:
    """The reference, with the checks that the GPU path makes."""
    check_call(call)
    host_budget(call.num_sms)
    aliasing.check_aliases(call)
    if call.check:
        check_memory(call)
    where = {
        "page_indptr": call.page_indptr, "cu_q_lens": call.cu_q_lens, "k_scale": call.k_scale,
        "v_scale": call.v_scale,
    }  # fmt: skip
    if not call.kv_lens.shape[0]:
        return call.q.new_zeros(call.q.shape) if call.out is None and not call.plain else call.out
    with torch.no_grad():
        if call.plain:
            reference.append_kv(*call[1:7], **where)
            return None
        return reference.qk_norm_rope_append(
            *call[:7], cos_sin=call.cos_sin, interleaved=bool(call.interleaved),
            q_norm=call.q_norm, k_norm=call.k_norm, eps=float(call.eps), positions=call.positions,
            out=call.out, **where,
        )  # fmt: skip


def run(call: Call) -> Tensor | None:
    """On the device of the caches, or by the reference on the CPU."""
    if call.k_cache.is_cuda:
        return eager_append(call.k_cache.get_device())(call)
    return append_cpu(call)


@cache
def eager_append(index: int) -> EagerAppend:
    """The eager path of a device, made at its first append and kept for the process."""
    return EagerAppend(index, load_append_dispatcher(index), runtime_streams())
