"""Calls of every public operator on CPU tensors, and what they should give, in fp64 by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Made:
    """A call that is served.

    Args:
        arguments: By name.
        truth: What it gives, in fp64; None where that is compared in another way.
        changed: Arguments that it changes; their truth follows that of the results.
    """

    arguments: Arguments
    truth: tuple[Tensor, ...] | None
    changed: tuple[str, ...] = ()


def normal(random: Random, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows apart or not, the inner stride 1."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    room = random.choice((0, 0, 3))
    wide = torch.randn(*shape[:-1], shape[-1] + room, generator=generator).to(dtype)
    return wide[..., : shape[-1]]


def ints(random: Random, low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def maybe(random: Random, arguments: Arguments, **options: Callable[[], Any]) -> Arguments:
    """The arguments and some of the options."""
    return arguments | {name: made() for name, made in options.items() if random.random() < 0.5}


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gemm(random: Random) -> Made:
    m, n, k = random.randint(0, 9), random.randint(0, 9), random.randint(0, 40)
    dtype = random.choice(DTYPES)
    given = maybe(
        random,
        {"a": normal(random, m, k, dtype=dtype), "w": normal(random, n, k, dtype=dtype)},
        bias=lambda: normal(random, n, dtype=dtype),
        residual=lambda: normal(random, m, n, dtype=dtype),
        activation=lambda: random.choice((None, "silu", "gelu")),
        batch_invariant=lambda: True,
        num_sms=lambda: random.randint(1, 200),
        out=lambda: torch.full((m, n), torch.nan, dtype=dtype),
    )
    y = given["a"].double() @ given["w"].double().T + given.get("bias", torch.zeros(n)).double()
    kind = given.get("activation")
    if kind:
        y = silu(y) if kind == "silu" else y * 0.5 * (1 + torch.erf(y / 2**0.5))
    return Made(given, (y + given.get("residual", torch.zeros(m, n)).double(),))


def gemm_swiglu(random: Random) -> Made:
    m, n, k = random.randint(0, 9), random.randint(0, 9), random.randint(0, 40)
    dtype = random.choice(DTYPES)
    a, w = normal(random, m, k, dtype=dtype), normal(random, 2 * n, k, dtype=dtype)
    given = maybe(
        random,
        {"a": a, "w_gate_up": w},
        batch_invariant=lambda: True,
        out=lambda: torch.full((m, n), torch.nan, dtype=dtype),
    )
    both = a.double() @ w.double().T
    return Made(given, (silu(both[:, :n]) * both[:, n:],))


def grouped_gemm(random: Random) -> Made:
    experts, n, k = random.randint(1, 4), 2 * random.randint(1, 5), random.randint(1, 40)
    dtype, bounds = random.choice(DTYPES), sorted(random.randint(0, 9) for _ in range(3))
    bounds = [0, *bounds, *[bounds[-1]] * 4][: experts + 1]
    a = normal(random, bounds[-1], k, dtype=dtype)
    w = normal(random, experts, n, k, dtype=dtype)
    given = maybe(
        random,
        {"a": a, "w": w, "expert_offsets": torch.tensor(bounds, dtype=torch.int32)},
        swiglu=lambda: True,
        check=lambda: True,
    )
    rows = [
        row.double() @ w[e].double().T
        for e in range(experts)
        for row in a[bounds[e] : bounds[e + 1]]
    ]
    y = torch.stack(rows) if rows else torch.zeros(0, n).double()
    if given.get("swiglu"):
        y = silu(y[:, : n // 2]) * y[:, n // 2 :]
    return Made(given, (y,))


def merge_states(random: Random) -> Made:
    n, tokens, heads, dim = (random.randint(1, 4) for _ in range(4))
    outs = normal(random, n, tokens, heads, dim, dtype=random.choice(DTYPES))
    lses = normal(random, n, tokens, heads).contiguous()
    lses[lses < -1] = -inf
    weights = lses.double().softmax(0).nan_to_num(0.0)
    truth = ((weights[..., None] * outs.double()).sum(0), lses.double().logsumexp(0))
    given = {"outs": outs, "lses": lses}
    return Made(given | ({"outs": list(outs)} if random.random() < 0.2 else {}), truth)


def rows_of(random: Random, width: int = 1) -> Tensor:
    shape = random.randint(0, 9), width * random.randint(0, 40)
    return normal(random, *shape, dtype=random.choice(DTYPES))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.double()
    return y / (y.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def rms_norm(random: Random) -> Made:
    x, eps = rows_of(random), random.choice((1e-6, 1e-3))
    given = {"x": x, "weight": normal(random, x.shape[1], dtype=x.dtype), "eps": eps}
    if random.random() < 0.3:
        given["out"] = x.clone()
    return Made(given, (normed(x, given["weight"], eps),))


def add_rms_norm(random: Random) -> Made:
    x = rows_of(random)
    residual, weight = normal(random, *x.shape, dtype=x.dtype), normal(random, x.shape[1])
    added = x + residual
    truth = (normed(added, weight, 1e-6), added.double())
    return Made({"x": x, "residual": residual, "weight": weight}, truth, ("residual",))


def silu_and_mul(random: Random) -> Made:
    x = rows_of(random, 2)
    gate, up = x.double().chunk(2, 1)
    return Made({"x": x}, (silu(gate) * up,))


def embedding(random: Random) -> Made:
    table = rows_of(random)
    ids = ints(random, -2, len(table) + 2, random.randint(0, 9))
    rows = [table[i] if 0 <= i < len(table) else table.new_zeros(table.shape[1]) for i in ids]
    truth = torch.stack(rows) if rows else table.new_zeros(0, table.shape[1])
    given = {"ids": ids.long() if random.random() < 0.5 else ids, "table": table}
    return Made(given, (truth.double(),))


def topk_softmax(random: Random) -> Made:
    tokens, experts = random.randint(0, 9), random.randint(1, 40)
    logits = normal(random, tokens, experts).bfloat16().to(random.choice(DTYPES))
    count = random.randint(1, min(experts, 32))
    given = maybe(random, {"logits": logits, "top_k": count}, renormalize=lambda: False)
    shares, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights = shares[:, :count]
    if given.get("renormalize", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return Made(given, (weights, order[:, :count].double()))


def moe_permute(random: Random) -> Made:
    tokens, top_k, experts = (random.randint(1, 6) for _ in range(3))
    x = normal(random, tokens, random.randint(1, 9), dtype=random.choice(DTYPES))
    chosen = ints(random, 0, experts, tokens, top_k)
    order = sorted(range(tokens * top_k), key=lambda i: int(chosen.flatten()[i]))
    index = [order.index(i) for i in range(tokens * top_k)]
    counts = [int((chosen < e).sum()) for e in range(experts + 1)]
    rows = torch.stack([x[i // top_k] for i in order])
    truth = (rows.double(), torch.tensor(counts).double(), torch.tensor(index).double())
    return Made({"x": x, "experts": chosen, "num_experts": experts}, truth)


def moe_unpermute(random: Random) -> Made:
    tokens, top_k, hidden = (random.randint(1, 6) for _ in range(3))
    y = normal(random, random.randint(1, 9), hidden, dtype=random.choice(DTYPES))
    index = ints(random, -1, len(y) + 1, tokens * top_k)
    weights = normal(random, tokens, top_k)
    total = torch.zeros(tokens, hidden).double()
    for at, row in enumerate(index.tolist()):
        if 0 <= row < len(y):
            total[at // top_k] += weights[at // top_k, at % top_k].double() * y[row].double()
    given = maybe(
        random,
        {"y": y, "index": index, "weights": weights},
        residual=lambda: normal(random, tokens, hidden, dtype=y.dtype),
    )
    return Made(given, (total + given.get("residual", torch.zeros(1)).double(),))


def sample(random: Random) -> Made:
    batch, vocab = random.randint(0, 5), random.randint(1, 60)
    logits = normal(random, batch, vocab, dtype=random.choice(DTYPES))
    given: Arguments = {"logits": logits}
    if random.random() < 0.5:  # only the best token is left, whatever is drawn
        narrow: Arguments = random.choice(({"top_k": 1}, {"top_p": 1e-9}))
        if random.random() < 0.5:
            kinds = {int: torch.int32, float: torch.float32}
            narrow = {k: torch.full((batch,), x, dtype=kinds[type(x)]) for k, x in narrow.items()}
        given |= {"temperature": 1.0, "seeds": random.randrange(9)} | narrow
    best = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, 0]
    return Made(given, (best.double(),))
