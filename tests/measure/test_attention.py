"""Attention cases and operands on CPU tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from smkern.measure.attention import AttentionCase, AttentionOperands

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
SMALL = AttentionCase("small", "mixed", (1, 1, 21), (37, 5, 40), **HEADS)
DENSE = AttentionCase("dense", "prefill", (24, 24), (24, 24), **HEADS)
UNIFORM = AttentionCase("uniform", "decode", (1,) * 64, (4096,) * 64)
COLD = AttentionCase("cold", "decode", (1,) * 8, (1024,) * 8)


def test_bytes_and_flops_of_decode():
    assert UNIFORM.bytes_moved == 2 * 262144 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert (
        replace(UNIFORM, cache_dtype="fp8").bytes_moved
        == 2 * 262144 * 8 * 128 + 2 * 64 * 32 * 128 * 2
    )
    assert UNIFORM.flops == 4 * 128 * 32 * 262144


@pytest.mark.parametrize("case", [SMALL, DENSE, COLD], ids=lambda case: case.name)
def test_flops_count_the_visible_pairs(case):
    pairs = 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        pairs += sum(kv_len - q_len + t + 1 for t in range(q_len))
    assert case.flops == 4 * case.head_dim * case.num_q_heads * pairs


def test_small_caches_rotate_past_the_l2():
    assert COLD.num_sets * COLD.bytes_moved > 2 * 60e6
    assert UNIFORM.num_sets == 1


def test_only_equal_prompts_with_nothing_cached_are_dense():
    assert [case.is_dense for case in (DENSE, SMALL, UNIFORM)] == [True, False, False]
    cached = AttentionCase("cached", "prefill", (8,), (16,))
    assert not cached.is_dense
    assert [case.num_decode for case in (DENSE, SMALL, UNIFORM)] == [0, 2, 64]


@pytest.fixture(scope="module")
def small() -> AttentionOperands:
    return AttentionOperands(SMALL, device="cpu")


def test_every_page_is_used_once_and_the_table_names_it(small):
    pages = small.pages
    assert sorted(pages.indices.tolist()) == list(range(pages.num_pages))
    for row, kv_len in enumerate(SMALL.kv_lens):
        begin, end = pages.indptr[row], pages.indptr[row + 1]
        count = int(end - begin)
        assert pages.table[row, :count].tolist() == pages.indices[begin:end].tolist()
        assert (count - 1) * SMALL.page_size + int(pages.last_page_len[row]) == kv_len
    assert pages.table.dtype == pages.indptr.dtype == pages.last_page_len.dtype == torch.int32


def test_both_layouts_hold_the_same_values(small):
    one = small.sets[0]
    for layout, pool in (("HND", one.k.transpose(1, 2)), ("NHD", one.k)):
        k, _ = small.pool(0, layout)
        assert k.is_contiguous()
        assert torch.equal(k, pool)


def test_the_reference_is_causal_attention(small):
    q, reference = small.sets[0].q, small.reference()
    k, v = (x.float() for x in small.gathered(0, 2))
    token, head = 7, 3
    visible = SMALL.kv_lens[2] - SMALL.q_lens[2] + token + 1
    scores = k[:visible, head // 2] @ q[2 + token, head].float() / math.sqrt(SMALL.head_dim)
    expected = scores.softmax(0) @ v[:visible, head // 2]
    torch.testing.assert_close(reference[2 + token, head], expected)
    small.poison()
    assert math.isnan(small.error(small.sets[0].out))
    assert small.error(reference) == 0.0


def test_dense_operands_give_the_paged_result():
    ops = AttentionOperands(DENSE, device="cpu")
    q, k, v = (x.float() for x in ops.dense(0))
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert ops.error(out.reshape(ops.sets[0].q.shape)) < 1e-6


def test_an_fp8_cache_is_gathered_as_fp8():
    case = AttentionCase(
        "fp8", "decode", (1, 1), (20, 3), "fp8", num_q_heads=2, num_kv_heads=1, head_dim=16
    )
    ops = AttentionOperands(case, device="cpu")
    k, _ = ops.gathered(0, 0)
    assert (k.dtype, tuple(k.shape)) == (torch.float8_e4m3fn, (20, 1, 16))
    assert bool(ops.reference().isfinite().all())
