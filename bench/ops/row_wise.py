"""Operators that go over rows: norms, SwiGLU's product, the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import smkern
from smkern.bench.ops.cases import OpCase
from smkern.bench.ops.rivals import Rivals, if_there, poison, random_of

EPS = 1e-6


def torch_rms_norm(x: Tensor, weight: Tensor, out: Tensor) -> Sequence[Tensor]:
    """As a model in plain torch does it."""
    normed = x.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + EPS)
    return (weight * normed.to(x.dtype),)


def rms_norm(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    random = random_of(device, 1)
    tokens, hidden = case["tokens"], case["hidden"]
    weight = random(hidden)
    sets = [
        (random(tokens, hidden), weight, torch.empty_like(weight).expand(tokens, -1).contiguous())
        for _ in range(case.num_sets)
    ]

    def ours(x: Tensor, weight: Tensor, out: Tensor) -> Sequence[Tensor]:
        return (smkern.rms_norm(x, weight, eps=EPS, out=out),)

    def fused(x: Tensor, weight: Tensor, out: Tensor) -> Sequence[Tensor]:
        return (functional.rms_norm(x, (hidden,), weight, EPS),)

    def theirs(x: Tensor, weight: Tensor, out: Tensor) -> Sequence[Tensor]:
        flashinfer.norm.rmsnorm(x, weight, EPS, out=out)
        return (out,)

    others = {"torch:rms_norm": fused, **if_there(flashinfer, theirs)}
    return Rivals(sets, ours, torch_rms_norm, others)


def torch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor
) -> Sequence[Tensor]:
    residual.add_(x)
    return (*torch_rms_norm(residual, weight, out), residual)


def add_rms_norm(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    """The residual is updated in place; FlashInfer puts the norm where x was."""
    random = random_of(device, 2)
    tokens, hidden = case["tokens"], case["hidden"]
    weight = random(hidden)
    sets = [
        (random(tokens, hidden), random(tokens, hidden), weight, random(tokens, hidden))
        for _ in range(case.num_sets)
    ]
    x, residual, _, out = sets[0]
    kept = x.clone(), residual.clone()
    total = residual + x
    wanted = (*torch_rms_norm(total.float(), weight.float(), out), total)

    def undo() -> None:
        x.copy_(kept[0])
        residual.copy_(kept[1])
        poison(out)

    def ours(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> Sequence[Tensor]:
        return smkern.add_rms_norm(x, residual, weight, eps=EPS, out=out), residual

    def theirs(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor) -> Sequence[Tensor]:
        flashinfer.norm.fused_add_rmsnorm(x, residual, weight, EPS)
        return x, residual

    others = if_there(flashinfer, theirs)
    return Rivals(sets, ours, torch_add_rms_norm, others, undo=undo, reference=wanted)


def torch_silu_and_mul(x: Tensor, out: Tensor) -> Sequence[Tensor]:
    gate, up = x.chunk(2, -1)
    return (functional.silu(gate) * up,)


def silu_and_mul(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    random = random_of(device, 3)
    tokens, inner = case["tokens"], case["inner"]
    sets = [(random(tokens, 2 * inner), random(tokens, inner)) for _ in range(case.num_sets)]

    def ours(x: Tensor, out: Tensor) -> Sequence[Tensor]:
        return (smkern.silu_and_mul(x, out=out),)

    def theirs(x: Tensor, out: Tensor) -> Sequence[Tensor]:
        flashinfer.activation.silu_and_mul(x, out)
        return (out,)

    return Rivals(sets, ours, torch_silu_and_mul, if_there(flashinfer, theirs))


def torch_embedding(ids: Tensor, table: Tensor, out: Tensor) -> Sequence[Tensor]:
    return (functional.embedding(ids, table),)


def embedding(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    """One table for all sets, other rows of it."""
    random = random_of(device, 4)
    tokens, hidden, vocab = case["tokens"], case["hidden"], case["vocab"]
    table = random(vocab, hidden)
    generator = torch.Generator(device).manual_seed(tokens)
    sets = [
        (
            torch.randint(vocab, (tokens,), generator=generator, device=device, dtype=torch.int32),
            table,
            random(tokens, hidden),
        )
        for _ in range(case.num_sets)
    ]

    def ours(ids: Tensor, table: Tensor, out: Tensor) -> Sequence[Tensor]:
        return (smkern.embedding(ids, table, out=out),)

    wanted = (table[sets[0][0].long()],)
    return Rivals(sets, ours, torch_embedding, reference=wanted)
