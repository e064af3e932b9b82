"""A mixture of experts step by step: routing, permutation, grouped products, the way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import smkern
from smkern.bench.ops.cases import OpCase, expert_counts
from smkern.bench.ops.rivals import Rivals, Step, if_there, poison, random_of
from smkern.bench.ops.row_wise import torch_silu_and_mul

SMALL = 0.02
"""Standard deviation of weights."""
SEGMENT_WORKSPACE = 128 << 20
SEGMENTS = "flashinfer:segments"


def topk_softmax(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    random = random_of(device, 8)
    tokens, experts, top_k = case["tokens"], case["experts"], case["top_k"]
    sets = [
        (
            random(tokens, experts),
            torch.empty(tokens, top_k, device=device),
            torch.empty(tokens, top_k, dtype=torch.int32, device=device),
        )
        for _ in range(case.num_sets)
    ]

    def ours(logits: Tensor, *out: Tensor) -> Sequence[Tensor]:
        weights, chosen = smkern.topk_softmax(logits, top_k, out=(out[0], out[1]))
        return weights, chosen

    def sequence(logits: Tensor, *out: Tensor) -> Sequence[Tensor]:
        weights, chosen = logits.float().softmax(-1).topk(top_k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen.int()

    logits, *out = sets[0]
    probs = logits.float().softmax(-1)
    wanted = sequence(logits)[0]

    def judge(results: Sequence[Tensor]) -> str | None:
        """Experts that tie may come in another order: their weights are what counts."""
        weights, chosen = results
        if bool(((chosen < 0) | (chosen >= experts)).any()):
            return "wrong result: experts that are not there"
        got = probs.gather(1, chosen.long())
        got = got / got.sum(-1, keepdim=True)
        close = torch.allclose(weights, wanted, atol=1e-5) and torch.allclose(
            got, wanted, atol=1e-5
        )
        return None if close else "wrong result: other experts, or other weights, than torch's"

    return Rivals(sets, ours, sequence, undo=lambda: poison(*out), judge=judge)


def moe_permute(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    random = random_of(device, 9)
    tokens, hidden, experts, top_k = (case[n] for n in ("tokens", "hidden", "experts", "top_k"))
    sets = [
        (
            random(tokens, hidden),
            random(tokens, experts).float().topk(top_k, -1).indices.int(),
            random(tokens * top_k, hidden),
            torch.empty(experts + 1, dtype=torch.int32, device=device),
            torch.empty(tokens * top_k, dtype=torch.int32, device=device),
        )
        for _ in range(case.num_sets)
    ]

    def ours(x: Tensor, chosen: Tensor, *out: Tensor) -> Sequence[Tensor]:
        return smkern.moe_permute(x, chosen, experts, out=(out[0], out[1], out[2]))

    numbers = torch.arange(experts + 1, dtype=torch.int32, device=device)
    places = torch.arange(tokens * top_k, dtype=torch.int64, device=device)

    def sequence(x: Tensor, chosen: Tensor, *out: Tensor) -> Sequence[Tensor]:
        flat, order = chosen.flatten().sort(stable=True)
        offsets = torch.searchsorted(flat, numbers, out_int32=True)
        index = torch.empty_like(order).scatter_(0, order, places)
        return x[order // top_k], offsets, index.int()

    wanted = sequence(*sets[0])
    return Rivals(sets, ours, sequence, undo=lambda: poison(*sets[0][2:]), reference=wanted)


def grouped_gemm(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    """Peers know every expert's rows on the host, which a serving step does not."""
    random = random_of(device, 10)
    rows, n, k, experts = (case[name] for name in ("rows", "n", "k", "experts"))
    swiglu, counts = case["swiglu"], expert_counts(rows, experts, case["routing"])
    offsets = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    columns = 2 * n if swiglu else n
    sets = [
        (random(rows, k), random(experts, columns, k, scale=SMALL), random(rows, n))
        for _ in range(case.num_sets)
    ]
    starts = [sum(counts[:i]) for i in range(experts + 1)]

    def ours(a: Tensor, w: Tensor, out: Tensor) -> Sequence[Tensor]:
        return (smkern.grouped_gemm(a, w, offsets, swiglu=swiglu, out=out),)

    def finished(product: Tensor, out: Tensor) -> Sequence[Tensor]:
        return torch_silu_and_mul(product, out) if swiglu else (product,)

    def sequence(a: Tensor, w: Tensor, out: Tensor) -> Sequence[Tensor]:
        product = a.new_empty(rows, columns)
        for expert, count in enumerate(counts):
            if count:
                part = slice(starts[expert], starts[expert + 1])
                torch.mm(a[part], w[expert].t(), out=product[part])
        return finished(product, out)

    def grouped(a: Tensor, w: Tensor, out: Tensor) -> Sequence[Tensor]:
        return finished(torch._grouped_mm(a, w.transpose(1, 2), offs=offsets[1:]), out)

    segments = _segments(flashinfer, offsets, experts, swiglu)
    others = {"torch:grouped_mm": grouped, **if_there(flashinfer, segments, SEGMENTS)}
    return Rivals(
        sets,
        ours,
        sequence,
        others,
        to_compile=grouped,  # 128 products one by one are minutes of its time
        reference=sequence(*sets[0]),
    )


def _segments(module: Any, offsets: Tensor, experts: int, swiglu: bool) -> Step:
    """FlashInfer's GEMM of segments, then its activation."""
    wrappers: list[Any] = []
    starts = offsets.long()

    def step(a: Tensor, w: Tensor, out: Tensor) -> Sequence[Tensor]:
        if not wrappers:
            workspace = torch.empty(SEGMENT_WORKSPACE, dtype=torch.int8, device=a.device)
            wrappers.append(module.gemm.SegmentGEMMWrapper(workspace))
        product = wrappers[0].run(a, w, experts, True, seg_indptr=starts)
        if not swiglu:
            return (product,)
        module.activation.silu_and_mul(product, out)
        return (out,)

    return step


def moe_unpermute(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    random = random_of(device, 11)
    tokens, hidden, top_k = case["tokens"], case["hidden"], case["top_k"]
    generator = torch.Generator(device).manual_seed(tokens)
    sets = []
    for _ in range(case.num_sets):
        index = torch.randperm(tokens * top_k, generator=generator, device=device).int()
        weights = random(tokens, top_k).float().softmax(-1)
        sets.append(
            (random(tokens * top_k, hidden), index, weights, random(tokens, hidden),
             random(tokens, hidden))
        )  # fmt: skip

    def ours(
        y: Tensor, index: Tensor, weights: Tensor, residual: Tensor, out: Tensor
    ) -> Sequence[Tensor]:
        return (smkern.moe_unpermute(y, index, weights, residual=residual, out=out),)

    def sequence(
        y: Tensor, index: Tensor, weights: Tensor, residual: Tensor, out: Tensor
    ) -> Sequence[Tensor]:
        rows = y[index.long()].view(tokens, top_k, hidden)
        return (residual + (rows * weights[..., None]).sum(1).to(y.dtype),)

    return Rivals(sets, ours, sequence)
