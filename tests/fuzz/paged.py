"""Calls of the operators over pages, and what they should give, in fp64 by hand."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from tests.fuzz.operators import DTYPES, Arguments, Made, maybe, normal
from tests.ops.attention.by_hand import attention_by_hand

FP8 = torch.float8_e4m3fn


def step_of(random: Random) -> tuple[Arguments, list[range], list[list[int]], int]:
    """Caches, table, lengths; each request's tokens; the slots of its keys; all tokens."""
    size, heads = random.choice((1, 16)), random.randint(1, 2)
    dim, batch = random.choice((64, 96)), random.randint(0, 4)
    dtype = random.choice(DTYPES)
    lens = [random.randint(1, 3 * size) for _ in range(batch)]
    q_lens = [random.randint(0, min(length, 3)) for length in lens]
    ragged = random.random() < 0.5
    starts = [sum(q_lens[:i]) for i in range(batch + 1)] if ragged else list(range(batch + 1))
    pages = [-(-length // size) for length in lens]
    order = torch.randperm(sum(pages) + 1, generator=torch.Generator().manual_seed(len(lens)))
    rows = [order[sum(pages[:i]) : sum(pages[: i + 1])].tolist() for i in range(batch)]
    given: Arguments = {"kv_lens": torch.tensor(lens, dtype=torch.int32)}
    if random.random() < 0.3:
        given["page_table"] = torch.tensor([p for row in rows for p in row], dtype=torch.int32)
        bounds = [sum(pages[:i]) for i in range(batch + 1)]
        given["page_indptr"] = torch.tensor(bounds, dtype=torch.int32)
    else:
        padded = [row + [-1] * (max(pages) - len(row)) for row in rows]
        given["page_table"] = torch.tensor(padded, dtype=torch.int32).view(batch, -1 if rows else 0)
    if ragged:
        given["cu_q_lens"] = torch.tensor(starts, dtype=torch.int32)
    cache = normal(random, sum(pages) + 1, size, heads, 2 * dim, dtype=dtype)
    given["k_cache"], given["v_cache"] = cache[..., :dim], cache[..., dim:]
    if random.random() < 0.3:
        given |= {name: given[name].to(FP8) for name in ("k_cache", "v_cache")}
        given = maybe(random, given, k_scale=lambda: 0.5, v_scale=lambda: torch.tensor(2.0))
    spans = [range(starts[i], starts[i + 1]) for i in range(batch)]
    pairs = zip(rows, lens, strict=True)
    where = [[row[j // size] * size + j % size for j in range(n)] for row, n in pairs]
    return given, spans, where, starts[-1] + (random.choice((0, 2)) if ragged else 0)


def flat(cache: Tensor) -> Tensor:
    """[pages * page_size, kv_heads, head_dim] in fp64."""
    return cache.double().flatten(0, 1)


def paged_attention(random: Random) -> Made:
    given, spans, where, tokens = step_of(random)
    kv_heads, dim = given["k_cache"].shape[2:]
    group = random.randint(1, 3)
    dtype = random.choice(DTYPES) if given["k_cache"].dtype is FP8 else given["k_cache"].dtype
    given["q"] = normal(random, tokens, kv_heads * group, dim, dtype=dtype)
    if "cu_q_lens" in given:
        given["max_q_len"] = max((len(span) for span in spans), default=1) or 1
    given = maybe(
        random,
        given,
        causal=lambda: random.random() < 0.5,
        scale=lambda: random.choice((0.1, 1.0)),
        window=lambda: random.randint(1, 40),
        softcap=lambda: 2.0,
        sinks=lambda: normal(random, kv_heads * group).contiguous(),
        check=lambda: True,
    )
    given["return_lse"] = True
    k, v = (flat(given[name]) for name in ("k_cache", "v_cache"))
    names = ("causal", "scale", "window", "softcap", "sinks", "k_scale", "v_scale")
    options = {name: given[name] for name in names if name in given}
    keys, values = ([x[slots] for slots in where] for x in (k, v))
    return Made(given, attention_by_hand(given["q"], keys, values, spans, **options))


def append_kv(random: Random) -> Made:
    given, spans, where, tokens = step_of(random)
    shape = given["k_cache"].shape[2:]
    dtype = random.choice(DTYPES) if given["k_cache"].dtype is FP8 else given["k_cache"].dtype
    given |= {name: normal(random, tokens, *shape, dtype=dtype) for name in ("k", "v")}
    given = maybe(random, given, check=lambda: True)
    return Made(given, stored(given, given["k"].double(), spans, where), ("k_cache", "v_cache"))


def stored(
    given: Arguments, k: Tensor, spans: list[range], where: list[list[int]]
) -> tuple[Tensor, ...]:
    """Both caches after the new tokens."""
    found = []
    for name, rows in (("k", k), ("v", given["v"].double())):
        cache = flat(given[f"{name}_cache"]).clone()
        scaled = rows / float(given.get(f"{name}_scale", 1.0))
        if given["k_cache"].dtype is FP8:
            scaled = scaled.clamp(-448, 448)
        for span, slots in zip(spans, where, strict=True):
            for at in span:
                cache[slots[len(slots) - len(span) + at - span.start]] = scaled[at]
        found.append(cache.view(given["k_cache"].shape))
    return tuple(found)


def qk_norm_rope_append(random: Random) -> Made:
    given, spans, where, tokens = step_of(random)
    heads, dim = given["k_cache"].shape[2:]
    dtype = random.choice(DTYPES) if given["k_cache"].dtype is FP8 else given["k_cache"].dtype
    given |= {name: normal(random, tokens, heads, dim, dtype=dtype) for name in ("k", "v")}
    given["q"] = normal(random, tokens, heads * random.randint(1, 3), dim, dtype=dtype)
    given = maybe(random, given, check=lambda: True, num_sms=lambda: 3)
    if random.random() < 0.5:
        given |= {name: normal(random, dim).contiguous() for name in ("q_norm", "k_norm")}
    if random.random() < 0.5:
        table = normal(random, 60, 2 * random.randint(1, dim // 2))
        given |= {"cos_sin": table, "interleaved": random.random() < 0.5}
    position = torch.zeros(tokens, dtype=torch.long)
    for span, slots in zip(spans, where, strict=True):
        for at in span:
            position[at] = len(slots) - len(span) + at - span.start
    q, k = (turned(given, given[x].double(), f"{x}_norm", position) for x in ("q", "k"))
    q[spans[-1].stop if spans else 0 :] = 0
    truth = (q, *stored(given, k, spans, where))
    return Made(given, truth, ("k_cache", "v_cache"))


def turned(given: Arguments, x: Tensor, norm: str, position: Tensor) -> Tensor:
    """Norm and RoPE, a pair of dimensions at a time."""
    if norm in given:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * given[norm].double()
    if "cos_sin" not in given:
        return x
    table, y = given["cos_sin"].double()[position], x.clone()
    half = table.shape[1] // 2
    for i in range(half):
        one, two = (2 * i, 2 * i + 1) if given["interleaved"] else (i, i + half)
        cos, sin = table[:, i, None], table[:, half + i, None]
        y[..., one] = x[..., one] * cos - x[..., two] * sin
        y[..., two] = x[..., two] * cos + x[..., one] * sin
    return y


def plan_attention(random: Random) -> Made:
    given, spans, *_ = step_of(random)
    sizes = given["k_cache"].shape
    arguments = {name: given[name] for name in ("kv_lens", "cu_q_lens") if name in given}
    arguments |= {
        "num_q_heads": sizes[2] * 2, "num_kv_heads": sizes[2], "head_dim": sizes[3],
        "page_size": sizes[1], "max_kv_len": 3 * sizes[1],
    }  # fmt: skip
    if "cu_q_lens" in given:
        arguments["max_q_len"] = max((len(span) for span in spans), default=1) or 1
    options = {"check": lambda: True, "num_sms": lambda: 3, "causal": lambda: False}
    return Made(maybe(random, arguments, **options), None)
