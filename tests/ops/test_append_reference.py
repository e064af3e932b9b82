"""The reference of the append operators against loops over tokens and heads, in fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from smkern.ops.reference import append as reference
from smkern.rope import Rope
from tests.ops.append_cases import FP8, Case, make

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
KV_LENS = [9, 3, 1, 30, 5]
Q_LENS = [2, 3, 0, 7, 1]
BASE = Case(
    tuple(zip(Q_LENS, KV_LENS, strict=True)), HEADS, KV_HEADS, DIM, PAGE, dtype=torch.float32
)


def by_hand(x, position, rope, weight, eps):
    """One head of one token, as the papers write it, in Python's floats."""
    x = [float(value) for value in x]
    if weight is not None:
        mean = sum(value * value for value in x) / len(x)
        x = [value / math.sqrt(mean + eps) * float(w) for value, w in zip(x, weight, strict=True)]
    if rope is None:
        return x
    half = rope.rotary_dim // 2
    for i, frequency in enumerate(rope.inv_freq.tolist()):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        turn = complex(math.cos(position * frequency), math.sin(position * frequency))
        turned = complex(x[a], x[b]) * turn
        x[a], x[b] = turned.real, turned.imag
    return x


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "rope", [None, Rope(DIM), Rope(32), Rope(DIM, interleaved=True), Rope(16, interleaved=True)]
)
def test_values(rope, norm):
    args, ragged = make(BASE)
    weights = [torch.randn(DIM), torch.randn(DIM)] if norm else [None, None]
    out = reference.qk_norm_rope_append(
        *args, **ragged, cos_sin=None if rope is None else rope.table(64),
        interleaved=rope is not None and rope.interleaved, q_norm=weights[0], k_norm=weights[1],
        eps=1e-3,
    )  # fmt: skip
    q, k, v, k_cache, v_cache, table, _ = args
    want_k, want_v = torch.full_like(k_cache, torch.nan), torch.full_like(v_cache, torch.nan)
    want_q = torch.empty_like(q)
    token = 0
    for r, (q_len, kv_len) in enumerate(zip(Q_LENS, KV_LENS, strict=True)):
        for position in range(kv_len - q_len, kv_len):
            page, slot = int(table[r, position // PAGE]), position % PAGE
            for head in range(HEADS):
                turned = by_hand(q[token, head], position, rope, weights[0], 1e-3)
                want_q[token, head] = torch.tensor(turned)
            for head in range(KV_HEADS):
                turned = by_hand(k[token, head], position, rope, weights[1], 1e-3)
                want_k[page, slot, head] = torch.tensor(turned)
                want_v[page, slot, head] = v[token, head]
            token += 1
    torch.testing.assert_close(out, want_q, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k_cache, want_k, atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(v_cache, want_v, atol=0, rtol=0, equal_nan=True)


def test_one_token_a_request_and_a_flat_table():
    args, _ = make(replace(BASE, requests=tuple((1, n) for n in KV_LENS), dtype=torch.float16))
    q, k, v, k_cache, v_cache, table, kv_lens = args
    rope = Rope(DIM)
    reference.qk_norm_rope_append(*args, cos_sin=rope.table(40))
    counts = [-(-n // PAGE) for n in KV_LENS]
    flat = torch.cat([table[r, :n] for r, n in enumerate(counts)])
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    other = [torch.full_like(x, torch.nan) for x in (k_cache, v_cache)]
    reference.qk_norm_rope_append(
        q, k, v, *other, flat, kv_lens, page_indptr=indptr, cu_q_lens=torch.arange(6).int(),
        cos_sin=rope.table(40),
    )  # fmt: skip
    assert torch.equal(other[0].nan_to_num(7), k_cache.nan_to_num(7))
    assert torch.equal(other[1].nan_to_num(7), v_cache.nan_to_num(7))


def test_positions_override_those_of_rope_only():
    args, ragged = make(BASE)
    rope = Rope(DIM)
    where = torch.randint(0, 50, (sum(Q_LENS),))
    out = reference.qk_norm_rope_append(*args, **ragged, cos_sin=rope.table(50), positions=where)
    want = by_hand(args[0][3, 1], int(where[3]), rope, None, 0)
    torch.testing.assert_close(out[3, 1], torch.tensor(want), atol=1e-5, rtol=1e-5)
    written = ~args[3][..., 0, 0].isnan()
    assert int(written.sum()) == sum(Q_LENS)


def test_fp8_is_divided_saturated_and_keeps_nan():
    args, ragged = make(replace(BASE, cache_dtype=FP8))
    args[1][0, 0, :4] = torch.tensor([1e6, -1e6, torch.nan, 0.3])
    reference.append_kv(*args[1:], **ragged, k_scale=0.25, v_scale=torch.tensor([2.0]))
    page, slot = int(args[5][0, 7 // PAGE]), 7 % PAGE
    row = args[3][page, slot, 0].float()
    assert row[:2].tolist() == [448.0, -448.0]
    assert row[2].isnan()
    want = (4 * args[1][0, 0, 3:]).clamp(-448, 448).to(FP8).float()
    assert torch.equal(row[3:], want)
    want = (args[2][0] / 2).to(FP8).float()
    assert torch.equal(args[4][page, slot].float(), want)


def test_what_has_no_page_is_not_written():
    args, ragged = make(replace(BASE, dtype=torch.float16))
    _, k, v, k_cache, v_cache, table, kv_lens = args
    table[0, 1] = len(k_cache)  # of the token at 7; that at 8 has a page
    table[1, 0] = -1
    kv_lens[3] = 10_000
    kv_lens[4] = 0
    reference.append_kv(k, v, k_cache, v_cache, table, kv_lens, **ragged)
    for x, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache[int(table[0, 2]), 0], x[1])
        assert int((~cache.isnan()).sum()) == KV_HEADS * DIM
