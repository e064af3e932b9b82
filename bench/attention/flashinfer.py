"""FlashInfer's paged attention as a peer: its wrappers, planned once a case and captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import smkern
from smkern.bench.peers import once
from smkern.measure.attention import AttentionOperands, AttentionSet, Layout
from smkern.measure.timing import Call

WORKSPACE_BYTES = 512 << 20
"""Four times what FlashInfer recommends: partials of large split batches fit."""
XQA_BYTES, SEMAPHORE_BYTES = 256 << 20, 8 << 20
"""XQA's own workspace, zeros at first, and how much of it is semaphores."""
LAYOUTS: tuple[Layout, ...] = ("HND", "NHD")

Run = Callable[[AttentionSet, tuple[torch.Tensor, torch.Tensor]], None]


@dataclass(frozen=True, slots=True)
class FlashInfer:
    """The module, or None; the workspace serves all wrappers, one after another."""

    module: Any
    workspace: torch.Tensor | None

    @classmethod
    def of(cls, module: Any) -> FlashInfer:
        if module is None:
            return cls(None, None)
        return cls(module, torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda"))

    def calls(self, ops: AttentionOperands) -> Iterator[tuple[str, Layout, Callable[[], Call]]]:
        """(provider, layout, what makes its call) of every way FlashInfer has for the case.

        The decode kernels are tensor cores (`fa2`), CUDA cores and XQA, which takes its SM count
        from the caller: the partition's. FA3 takes no fp8 cache under bf16 queries, and XQA rounds
        these to e4m3 with one, an error of 4e-2: neither is asked to. A mixed step is a prefill and
        a decode one after the other, or one prefill launch for all rows. Wrappers are planned
        without graph padding, for these very lengths. Heads of 96 are left out: of 0.7.2 CUDA cores
        return other values and FA2 reads where it may not, after which nothing runs.
        """
        if self.module is None or ops.case.head_dim == 96:
            return
        for layout in LAYOUTS:
            for provider, make in self._ways(ops, layout).items():
                yield provider, layout, once(make)

    def _ways(self, ops: AttentionOperands, layout: Layout) -> dict[str, Callable[[], Call]]:
        case = ops.case
        backends = ("fa2",) if case.cache_dtype == "fp8" else ("fa2", "fa3")
        everything, prefills = range(case.batch), range(case.num_decode, case.batch)

        def way(*runs: Callable[[], Run]) -> Callable[[], Call]:
            return lambda: _call(ops, layout, *(make() for make in runs))

        decode = partial(self._decode, ops, layout)
        prefill = partial(self._prefill, ops, layout)
        if case.kind == "decode":
            ways = {b: way(partial(decode, everything, b)) for b in (*backends, "cuda-cores")}
            if case.cache_dtype == "bf16":
                ways["xqa"] = way(partial(self._xqa, ops, layout))
        elif case.kind == "prefill":
            ways = {b: way(partial(prefill, everything, b)) for b in backends}
        else:
            rest = partial(decode, range(case.num_decode), "fa2")
            ways = {b: way(partial(prefill, prefills, b), rest) for b in backends}
            ways["fa2-one-launch"] = way(partial(prefill, everything, "fa2"))
        return {f"flashinfer:{name}": made for name, made in ways.items()}

    def _decode(self, ops: AttentionOperands, layout: Layout, rows: range, backend: str) -> Run:
        options = {} if backend == "cuda-cores" else {"use_tensor_cores": True, "backend": backend}
        wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(self.workspace, layout, **options)
        wrapper.plan(*_pages(ops, rows), *_sizes(ops), **_dtypes(ops))
        return _run(wrapper, ops, rows)

    def _xqa(self, ops: AttentionOperands, layout: Layout) -> Run:
        case, table = ops.case, ops.pages.table
        own = torch.zeros(XQA_BYTES, dtype=torch.uint8, device=table.device)
        semaphores, partials = own[:SEMAPHORE_BYTES], own[SEMAPHORE_BYTES:]
        lens = ops.kv_lens.unsqueeze(1)

        def run(one: AttentionSet, cache: tuple[torch.Tensor, torch.Tensor]) -> None:
            self.module.xqa(
                one.q.unsqueeze(1), *cache, table, lens, one.out.unsqueeze(1), partials, semaphores,
                case.num_kv_heads, case.page_size, kv_layout=layout,
                sm_count=smkern.current_num_sms(),
            )  # fmt: skip

        return run

    def _prefill(self, ops: AttentionOperands, layout: Layout, rows: range, backend: str) -> Run:
        wrapper = self.module.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, layout, backend=backend
        )
        starts = torch.tensor(ops.case.cu_q_lens, dtype=torch.int32)[rows.start : rows.stop + 1]
        starts = starts - starts[0]
        wrapper.plan(starts, *_pages(ops, rows), *_sizes(ops), causal=True, **_dtypes(ops))
        return _run(wrapper, ops, rows)


def _call(ops: AttentionOperands, layout: Layout, *runs: Run) -> Call:
    sets = [(one, ops.pool(i, layout)) for i, one in enumerate(ops.sets)]
    count = len(sets)

    def call(i: int) -> torch.Tensor:
        one, cache = sets[i % count]
        for run in runs:
            run(one, cache)
        return one.out

    return call


def _run(wrapper: Any, ops: AttentionOperands, rows: range) -> Run:
    starts = ops.case.cu_q_lens
    tokens = slice(starts[rows.start], starts[rows.stop])

    def run(one: AttentionSet, cache: tuple[torch.Tensor, torch.Tensor]) -> None:
        wrapper.run(one.q[tokens], cache, out=one.out[tokens])

    return run


def _pages(ops: AttentionOperands, rows: range) -> tuple[torch.Tensor, ...]:
    """indptr, indices, last_page_len of some neighbouring requests, on the host."""
    pages = ops.pages
    indptr = pages.indptr[rows.start : rows.stop + 1]
    indices = pages.indices[int(indptr[0]) : int(indptr[-1])]
    return indptr - indptr[0], indices, pages.last_page_len[rows.start : rows.stop]


def _sizes(ops: AttentionOperands) -> tuple[int, int, int, int]:
    case = ops.case
    return case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size


def _dtypes(ops: AttentionOperands) -> dict[str, torch.dtype]:
    kv = torch.float8_e4m3fn if ops.case.cache_dtype == "fp8" else torch.bfloat16
    return {"q_data_type": torch.bfloat16, "kv_data_type": kv}
