"""Who appends in a benchmark: smkern, FlashInfer's kernels one after another, plain torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smkern.bench.frame import Bench, Peer, Provider, wrong_result
from smkern.bench.ops.providers import BUDGET_US, PEERS
from smkern.bench.peers import once
from smkern.measure.append import (
    EPS,
    K_SCALE,
    TOLERANCE,
    V_SCALE,
    AppendCase,
    AppendOperands,
    Layout,
    problem_of_case,
)
from smkern.measure.partitions import Place
from smkern.measure.timing import Call
from smkern.tuning.append import predict_us

LAYOUTS: tuple[Layout, ...] = ("HND", "NHD")
FP8_MAX = 448.0


def our_call(ops: AppendOperands) -> Call:
    """The public operator on the current stream's budget."""
    import smkern

    sets, count, options = ops.sets, len(ops.sets), ops.where
    caches = [one.cache("HND") for one in sets]

    def plain(i: int) -> None:
        one, (k, v) = sets[i % count], caches[i % count]
        smkern.append_kv(one.k, one.v, k, v, ops.table, ops.kv_lens, **options)

    turning = ops.turning

    def turned(i: int) -> None:
        one, (k, v) = sets[i % count], caches[i % count]
        smkern.qk_norm_rope_append(
            one.q, one.k, one.v, k, v, ops.table, ops.kv_lens, out=one.out, **turning, **options
        )

    return turned if ops.case.turns else plain


def selection(ops: AppendOperands, place: Place) -> dict[str, Any]:
    """The configuration that dispatch chose in a place, and from where it took it."""
    from smkern.ops.append.dispatch import append_dispatcher, of_step
    from smkern.tuning.append import APPEND_FAMILY

    problem = of_step(problem_of_case(ops))
    profile = append_dispatcher(ops.kv_lens.get_device()).profile
    found = APPEND_FAMILY.select(problem, place.budget, profile, APPEND_FAMILY.load(profile))
    config = found.config
    expected_us = predict_us(problem, config, place.budget, profile)
    words = f"warps={config.num_warps}:ctas_per_sm={config.ctas_per_sm}"
    return {"config": words, "source": found.source, "predicted_us": round(expected_us, 2)}


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.float()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _put(cache: Tensor, x: Tensor, page: Tensor, slot: Tensor, scale: float) -> None:
    if cache.element_size() == 1:
        x = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(cache.dtype).view(torch.uint8)
        cache = cache.view(torch.uint8)
    cache[page, slot] = x.to(cache.dtype)


def torch_append(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, page: Tensor,
    slot: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor, k_norm: Tensor, turns: bool,
) -> None:  # fmt: skip
    """As a model in plain torch does it, pages, slots and rows of the table known before."""
    if turns:
        out.copy_(_turn(_norm(q, q_norm), cos, sin))
        k = _turn(_norm(k, k_norm), cos, sin)
    _put(k_cache, k, page, slot, K_SCALE)
    _put(v_cache, v, page, slot, V_SCALE)


def torch_call(ops: AppendOperands, compiled: bool) -> Call:
    """Plain torch, or what its compiler makes of it."""
    run: Callable[..., None] = torch_append
    if compiled:
        torch._dynamo.reset()  # a function is compiled for a few sizes only, then no more
        run = torch.compile(torch_append, dynamic=False)
    sets, count, places = ops.sets, len(ops.sets), ops.places
    rows = ops.cos_sin[places.position][:, None, :]
    half = rows.shape[-1] // 2
    cos, sin = rows[..., :half].contiguous(), rows[..., half:].contiguous()
    caches = [one.cache("NHD") for one in sets]

    def call(i: int) -> None:
        one, (k, v) = sets[i % count], caches[i % count]
        run(
            one.q, one.k, one.v, k, v, one.out, places.page, places.slot, cos, sin, ops.q_norm,
            ops.k_norm, ops.case.turns,
        )  # fmt: skip

    return call


def flashinfer_call(module: Any, ops: AppendOperands, layout: Layout) -> Call:
    """FlashInfer's norms, RoPE and append: up to four kernels, on contiguous q, k and v.

    It has no append that converts: values for an fp8 cache are divided by torch.
    """
    case, places, sets, count = ops.case, ops.places, ops.sets, len(ops.sets)
    tokens, dim = case.tokens, case.head_dim
    rows = [tuple(x.contiguous() for x in (one.q, one.k, one.v)) for one in sets]
    normed = [(torch.empty_like(k), one.out) for (_, k, _), one in zip(rows, sets, strict=True)]
    batch = len(case.kv_lens)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=ops.device) * ops.table.shape[1]
    last = ((ops.kv_lens - 1) % case.page_size + 1).int()
    request, position = places.request.int(), places.position.int()
    indices, long_position = ops.table.flatten(), places.position.long()

    def call(i: int) -> None:
        one, (q, k, v) = sets[i % count], rows[i % count]
        if case.turns:
            k_out, q_out = normed[i % count]
            module.norm.rmsnorm(q.view(-1, dim), ops.q_norm, EPS, out=q_out.view(-1, dim))
            module.norm.rmsnorm(k.view(-1, dim), ops.k_norm, EPS, out=k_out.view(-1, dim))
            module.rope.apply_rope_with_cos_sin_cache_inplace(
                long_position, q_out.view(tokens, -1), k_out.view(tokens, -1), dim, ops.cos_sin
            )
            k = k_out
        if case.kind == "fp8":
            dtype = torch.float8_e4m3fn
            k = (k * (1 / K_SCALE)).clamp_(-FP8_MAX, FP8_MAX).to(dtype)
            v = (v * (1 / V_SCALE)).clamp_(-FP8_MAX, FP8_MAX).to(dtype)
        module.page.append_paged_kv_cache(
            k, v, request, position, one.caches[layout], indices, indptr, last, layout
        )

    return call


@dataclass(slots=True)
class AppendBench(Bench[AppendCase]):
    """smkern, FlashInfer's kernels in turn and torch on one case.

    Args:
        flashinfer: its module, or None.
        names: the peers that take part.
    """

    ops: AppendOperands
    flashinfer: Any
    names: Collection[str] = PEERS
    budget_us: float = BUDGET_US
    others: list[Peer] = field(init=False)

    def __post_init__(self) -> None:
        ops, paged = self.ops, {"layout": "NHD"}
        found: list[Peer] = [
            ("torch", paged, once(partial(torch_call, ops, False))),
            ("torch:compile", paged, once(partial(torch_call, ops, True))),
        ]
        self.others = [peer for peer in found if peer[0] in self.names]
        if self.flashinfer is not None and "other" in self.names:
            for layout in LAYOUTS:
                make = partial(flashinfer_call, self.flashinfer, ops, layout)
                self.others.append(("flashinfer", {"layout": layout}, once(make)))

    def ours(self, case: AppendCase, place: Place) -> list[Provider]:
        tell = partial(selection, self.ops, place)
        return [Provider("smkern", place, partial(our_call, self.ops), {"layout": "HND"}, tell)]

    def reset(self, case: AppendCase) -> None:
        self.ops.wanted()
        self.ops.poison()

    def complaint(self, case: AppendCase, provider: Provider, result: Any) -> str | None:
        relative = self.ops.error(provider.about["layout"])
        return wrong_result(relative, TOLERANCE[case.cache_dtype])
