"""Counted work is what the plan has: the same items, keys, tiles and partials."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.kernels.attention.items import (
    DECODE_SLOTS,
    ITEM_WORDS,
    KV_BEGIN,
    KV_END,
    NUM_DECODE,
    NUM_PREFILL,
    PREFILL_SLOTS,
    TILES,
    PlanLayout,
    plan_items,
)
from smkern.tuning.attention.shapes import AttentionShape
from smkern.tuning.attention.work import count_work, typical_lengths


def shape_of(q_lens, max_kv_len, *, group=4, heads=2, causal=True, window=0):
    return AttentionShape(
        batch=len(q_lens),
        num_q_heads=group * heads,
        num_kv_heads=heads,
        head_dim=128,
        page_size=16,
        max_q_len=max(max(q_lens), 1),
        max_kv_len=max_kv_len,
        max_tokens=max(sum(q_lens), 1),
        max_total_kv=len(q_lens) * max_kv_len,
        causal=causal,
        window=window,
    )


@settings(max_examples=60)
@given(
    q_lens=st.lists(st.sampled_from([0, 1, 2, 8, 9, 40, 700]), min_size=1, max_size=5),
    kv_len=st.integers(0, 40_000),
    group=st.sampled_from([1, 4, 5, 16, 40]),
    heads=st.sampled_from([1, 8]),
    causal=st.booleans(),
    window=st.sampled_from([0, 50, 5000]),
)
def test_counted_as_planned(q_lens, kv_len, group, heads, causal, window):
    kv_lens = [kv_len // (1 + i) for i in range(len(q_lens))]
    shape = shape_of(q_lens, 40_000, group=group, heads=heads, causal=causal, window=window)
    plan = plan_items(shape, kv_lens, np.concatenate([[0], np.cumsum(q_lens)]), num_ctas=16)
    layout = PlanLayout.of(shape)
    decode = plan[layout.decode_at :][: plan[NUM_DECODE] * ITEM_WORDS].reshape(-1, ITEM_WORDS)
    prefill = plan[layout.prefill_at :][: plan[NUM_PREFILL] * ITEM_WORDS].reshape(-1, ITEM_WORDS)
    work = count_work(shape, q_lens, kv_lens)
    keys = np.maximum(decode[:, KV_END] - decode[:, KV_BEGIN], 0)
    assert work.decode_keys.tolist() == keys.tolist()
    assert work.prefill_tiles.tolist() == prefill[:, TILES].tolist()
    assert (work.decode_slots, work.prefill_slots) == (plan[DECODE_SLOTS], plan[PREFILL_SLOTS])


@pytest.mark.parametrize(
    ("batch", "max_q_len", "max_tokens", "q_lens"),
    [
        (4, 1, 4, [1, 1, 1, 1]),
        (3, 4, 12, [4, 4, 4]),
        (2, 2048, 4096, [2048, 2048]),
        (3, 2048, 2050, [2048, 1, 1]),
        (3, 100, 150, [100, 49, 1]),
        (4, 100, 2, [1, 1, 0, 0]),
        (0, 1, 0, []),
    ],
)
def test_lengths_that_a_shape_allows(batch, max_q_len, max_tokens, q_lens):
    shape = AttentionShape(batch, 8, 2, 128, 16, max_q_len, 4096, max_tokens, batch * 1000)
    found, kv_lens = typical_lengths(shape)
    assert found == q_lens
    assert kv_lens == [1000] * batch


def test_given_lengths_repeat_and_are_clamped():
    shape = AttentionShape(5, 8, 2, 128, 16, 1, 4096, 5, 5 * 4096)
    assert typical_lengths(shape, [7, 9000])[1] == [7, 4096, 7, 4096, 7]


def test_bytes_and_flops_of_a_decode_step():
    shape = AttentionShape(2, 8, 2, 64, 16, 1, 512, 2, 1024)
    work = count_work(shape, [1, 1], [512, 512])
    keys_and_values = 2 * 1024 * 2 * 64 * 2
    assert work.bytes_moved(shape, 2) == keys_and_values + 2 * 2 * 2 * 8 * 64 + 4 * 64
    assert work.flops(shape) == 4 * 1024 * 8 * 64


def test_a_causal_square_has_half_its_pairs():
    shape = shape_of([256], 256)
    assert count_work(shape, [256], [256]).pairs == 256 * 257 // 2
