"""Who computes attention in a benchmark: smkern as dispatched and by kernel, SDPA, FlashInfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from smkern.bench.attention.flashinfer import FlashInfer, once
from smkern.bench.contest import Contender
from smkern.measure.attention import AttentionOperands
from smkern.measure.partitions import Place
from smkern.measure.timing import Call
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem

OUR_BACKENDS: dict[str, str | None] = {
    "smkern": None,
    "smkern:cuda": "cuda",
    "smkern:triton": "triton",
}
"""Provider to the `backend` of `smkern.paged_attention`: as dispatched; our CUDA; our Triton."""

SDPA_BACKENDS = {
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
}


def plan_of(ops: AttentionOperands, place: Place, out: Any = None) -> Any:
    """The plan of a case for a place's budget; refills `out` where given. Nothing is awaited."""
    import smkern

    case = ops.case
    with torch.cuda.stream(place.stream):
        return smkern.plan_attention(
            ops.kv_lens,
            num_q_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            page_size=case.page_size,
            cu_q_lens=None if case.kind == "decode" else ops.cu_q_lens,
            max_q_len=max(case.q_lens),
            max_kv_len=max(case.kv_lens),
            num_tokens=case.num_tokens,
            max_total_kv=ops.pages.num_pages * case.page_size,
            out=out,
        )


def our_call(ops: AttentionOperands, plan: Any, backend: str | None) -> Call:
    """The public operator under a plan that was made before; on the current stream's budget."""
    import smkern

    case, sets, table, kv_lens = ops.case, ops.sets, ops.pages.table, ops.kv_lens
    attention, count = smkern.paged_attention, len(ops.sets)
    options: dict[str, Any] = {"plan": plan, "backend": backend}
    if case.kind != "decode":
        options |= {"cu_q_lens": ops.cu_q_lens, "max_q_len": max(case.q_lens)}

    def call(i: int) -> torch.Tensor:
        one = sets[i % count]
        attention(one.q, one.k, one.v, table, kv_lens, out=one.out, **options)
        return one.out

    return call


def our_contenders(ops: AttentionOperands, place: Place) -> Iterator[Contender]:
    """Our providers in one place, over one plan: they run one after another."""
    plans: list[Any] = []

    def make(backend: str | None) -> Call:
        if not plans:
            plans.append(plan_of(ops, place))
            torch.cuda.synchronize()
        return our_call(ops, plans[0], backend)

    for provider, backend in OUR_BACKENDS.items():
        tell = partial(_selection, ops, plans, backend)
        yield Contender(provider, place, partial(make, backend), {"layout": "HND"}, tell)


def _selection(ops: AttentionOperands, plans: list[Any], backend: str | None) -> dict[str, str]:
    """The configuration that dispatch chose under a plan, and from where it took it."""
    from smkern.ops.attention.eager import eager_attention

    plan, dispatcher = plans[0], eager_attention(ops.kv_lens.get_device()).dispatcher
    problem = AttentionProblem(plan.shape, "bf16", ops.case.cache_dtype)
    selection = dispatcher.select(problem, plan.budget, backend)
    return {"config": describe(selection.config), "source": selection.source}


def describe(config: AttentionConfig) -> str:
    """A configuration in one word: its kernel and what differs from a default: `cuda:teams=2`."""
    default = AttentionConfig(config.kernel)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    unusual = [f"{n}={v}" for n, v in values.items() if v != getattr(default, n)]
    return ":".join([config.kernel, *unusual])


def sdpa_call(ops: AttentionOperands, backend: SDPBackend) -> Call:
    """torch's dense attention on contiguous K and V without pages; only for dense cases.

    A backend that refuses grouped heads gets K and V with a head for each query head, copied
    before anything is timed.
    """
    sets = [ops.dense(i) for i in range(ops.case.num_sets)]
    count, grouped = len(sets), True

    def call(i: int) -> torch.Tensor:
        q, k, v = sets[i % count]
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)

    try:
        call(0)
    except RuntimeError:
        group = ops.case.num_q_heads // ops.case.num_kv_heads
        repeat = partial(torch.repeat_interleave, repeats=group, dim=1)
        sets = [(q, repeat(k), repeat(v)) for q, k, v in sets]
        grouped = False
    return call


@dataclass(slots=True)
class Peers:
    """Every peer's calls for a case, made once and used in all its places."""

    ops: AttentionOperands
    flashinfer: FlashInfer
    _found: list[tuple[str, dict[str, Any], Callable[[], Call]]] = field(init=False)

    def __post_init__(self) -> None:
        found: list[tuple[str, dict[str, Any], Callable[[], Call]]] = [
            (provider, {"layout": layout}, make)
            for provider, layout, make in self.flashinfer.calls(self.ops)
        ]
        if self.ops.case.is_dense:
            for provider, backend in SDPA_BACKENDS.items():
                found.append((provider, {}, once(partial(sdpa_call, self.ops, backend))))
        self._found = found

    def at(self, place: Place) -> list[Contender]:
        return [Contender(provider, place, make, about) for provider, about, make in self._found]
