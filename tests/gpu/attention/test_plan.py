"""The plan that the device makes is the one that plan_items spells out, whatever the lengths."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

import smkern
from smkern.kernels.attention import items
from smkern.kernels.attention.args import WorkspaceLayout
from smkern.kernels.attention.items import ITEM_WORDS, PlanLayout, plan_items
from smkern.tuning.attention.shapes import DECODE_MAX_GROUP, PREFILL_ROWS, bundles_of
from tests.gpu.attention.cases import fresh_seed, int32
from tests.gpu.sides import at_most

HEADS = [(8, 2), (8, 8), (5, 1), (32, 8), (16, 1), (40, 1), (64, 2)]
LENGTHS = [
    0, 1, 15, 16, 127, 128, 129, 255, 256, 257, 511, 640, 641, 1000, 2049, 2176, 2177, 4096, 8192,
    8193, 20_000, 65_537, 65_793, 70_000,
]  # fmt: skip
QUERIES = [0, 1, 1, 1, 2, 5, 8, 9, 64, 127, 128, 129, 1000]


def plan(kv_lens, cu_q_lens=None, *, heads=(8, 2), **numbers):
    """A plan by the public operator, its buffers full of poison beforehand."""
    q_heads, kv_heads = heads
    numbers = {"head_dim": 128, "page_size": 16, "max_q_len": 1} | numbers
    lengths = int32(kv_lens)
    queries = None if cu_q_lens is None else int32(cu_q_lens)
    given = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "cu_q_lens": queries, **numbers}
    made = smkern.plan_attention(lengths, **given)
    made.buffer.fill_(0x7F7F7F7F)
    made.workspace.fill_(0xFF)
    again = smkern.plan_attention(lengths, out=made, **given)
    assert again is made
    return made


def check(made, kv_lens, cu_q_lens=None) -> np.ndarray:
    """Hold a plan's buffer and counters against plan_items; returns what that gives."""
    shape, layout = made.shape, PlanLayout.of(made.shape)
    want = plan_items(shape, kv_lens, cu_q_lens, made.budget.num_sms)
    got = made.buffer.cpu().numpy()
    words = slice(items.FIRST_COST + 1)
    assert got[words].tolist() == want[words].tolist(), f"header of {shape}"
    assert not got[items.FIRST_COST + 1 : items.HEADER_WORDS].any(), "words behind the counts"
    decode = _items(got, layout.decode_at, got[items.NUM_DECODE])
    assert np.array_equal(decode, _items(want, layout.decode_at, want[items.NUM_DECODE]))
    prefill = _items(got, layout.prefill_at, got[items.NUM_PREFILL])
    tiles = prefill[:, items.TILES]
    assert (np.diff(tiles) <= 0).all(), f"prefill items are not the longest first: {tiles}"
    right = _items(want, layout.prefill_at, want[items.NUM_PREFILL])
    assert sorted(map(tuple, prefill.tolist())) == sorted(map(tuple, right.tolist()))
    check_places(made, decode, prefill)
    counters = 4 * layout.num_counters * shape.num_kv_heads
    assert counters <= WorkspaceLayout.of(shape).decode_out
    assert not made.workspace[:counters].any(), "arrival counters"
    return want


def check_places(made, decode: np.ndarray, prefill: np.ndarray) -> None:
    """Partials and counters of every item lie inside the workspace, of dropped items' too."""
    shape, room = made.shape, WorkspaceLayout.of(made.shape)
    counters = PlanLayout.of(shape).num_counters
    decode_bytes = 4 * shape.num_kv_heads * shape.decode_rows * shape.head_dim
    prefill_bytes = 4 * shape.num_kv_heads * PREFILL_ROWS * shape.head_dim
    for found, slots in (
        (decode, (room.decode_stats - room.decode_out) // decode_bytes),
        (prefill, (room.prefill_stats - room.prefill_out) // prefill_bytes),
    ):
        cut = found[found[:, items.NUM_PIECES] > 1]
        pieces = cut[:, items.NUM_PIECES]
        bundles = np.array([bundles_of(n) for n in pieces], dtype=int) * (found is decode)
        ends = cut[:, items.FIRST_SLOT] + pieces + bundles
        assert (ends <= slots).all(), f"partials up to {ends.max()} of {slots}"
        assert (cut[:, items.COUNTER] + bundles < counters).all(), f"counters beyond {counters}"


def _items(buffer: np.ndarray, at: int, count: int) -> np.ndarray:
    return buffer[at : at + count * ITEM_WORDS].reshape(-1, ITEM_WORDS)


def starts(q_lens) -> list[int]:
    return [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", [1, 3, 33, 500])
def test_decode(batch, heads):
    chance = random.Random(fresh_seed())
    lengths = [chance.choice(LENGTHS) for _ in range(batch)]
    made = plan(lengths, heads=heads, max_kv_len=max(lengths) + 1)
    want = check(made, lengths)
    q_heads, kv_heads = heads
    brief = items.NUM_DECODE if q_heads // kv_heads <= DECODE_MAX_GROUP else items.NUM_PREFILL
    assert want[brief] >= batch


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 100}], ids=str)
def test_mixed(heads, head_dim, options):
    chance = random.Random(fresh_seed())
    for batch in (1, 7, 40):
        q_lens = [chance.choice(QUERIES) for _ in range(batch)]
        # some shorter than their queries: the first of them see nothing
        lengths = [max(0, q - 3) + chance.choice(LENGTHS) for q in q_lens]
        made = plan(
            lengths, starts(q_lens), heads=heads, head_dim=head_dim, max_q_len=1000,
            max_kv_len=72_000, num_tokens=sum(q_lens) + 5, **options,
        )  # fmt: skip
        check(made, lengths, starts(q_lens))


@pytest.mark.parametrize("window", [1, 100, 5000])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(window, causal):
    q_lens = [1, 8, 9, 300, 129, 1, 0]
    lengths = [70_000, 5001, 9000, 30_000, 100, 1, 50]
    made = plan(
        lengths, starts(q_lens), max_q_len=300, max_kv_len=70_000, window=window, causal=causal,
        num_tokens=sum(q_lens),
    )  # fmt: skip
    check(made, lengths, starts(q_lens))


def test_many_long_items():
    """Lengths in tiles beyond those that the kernel tells apart; uncut and cut keys."""
    q_lens = [4000, 9, 200, 16, 2500]
    lengths = [200_000, 500_000, 131_072, 131_073, 2500]
    for heads in ((8, 2), (64, 8)):
        made = plan(
            lengths, starts(q_lens), heads=heads, max_q_len=4000, max_kv_len=500_000,
            num_tokens=sum(q_lens),
        )  # fmt: skip
        layout = PlanLayout.of(made.shape)
        want = plan_items(made.shape, lengths, starts(q_lens), made.budget.num_sms)
        got = made.buffer.cpu().numpy()
        assert got[:6].tolist() == want[:6].tolist()
        found = [_items(x, layout.prefill_at, want[items.NUM_PREFILL]) for x in (got, want)]
        assert sorted(map(tuple, found[0].tolist())) == sorted(map(tuple, found[1].tolist()))
        # above 1023 tiles any order will do
        tiles = np.minimum(found[0][:, items.TILES], 1023)
        assert (np.diff(tiles) <= 0).all()


def test_lengths_outside_the_shape_are_clamped():
    lengths = [-5, 3000, 2**31 - 1, -(2**31), 0, 1000]
    check(plan(lengths, max_kv_len=1000), lengths)
    queries = [0, 4, 3, 50, -7, 1000, 20]
    for most in (1, 8, 30):
        made = plan(lengths, queries, max_q_len=most, max_kv_len=1000, num_tokens=64)
        check(made, lengths, queries)


@pytest.mark.parametrize("seed", range(3))
def test_garbage_lengths_give_the_specified_plan(seed):
    chance = random.Random(fresh_seed() + seed)
    lengths = [chance.randrange(-(2**31), 2**31) for _ in range(50)]
    queries = [chance.randrange(-(2**31), 2**31) for _ in range(51)]
    made = plan(lengths, queries, max_q_len=700, max_kv_len=3000, num_tokens=900)
    check(made, lengths, queries)


def test_items_beyond_the_buffer_are_counted():
    """A wrong bound on the sum of the lengths: dropped items, no write behind the buffer."""
    lengths = [5000] * 20
    made = plan(lengths, max_kv_len=5000, max_total_kv=2000)
    want = check(made, lengths)
    assert want[items.OVERFLOW] > 0


def test_ranges_that_overlap_are_dropped_where_they_do_not_fit():
    """Bad cu_q_lens give more row blocks than any good ones: none may leave its buffers."""
    lengths = [30_000, 20_000, 9000, 40_000, 12_000, 25_000] * 4
    queries = [0, *[60, 0] * 12]
    made = plan(lengths, queries, max_q_len=60, max_kv_len=40_000, num_tokens=60)
    want = check(made, lengths, queries)
    assert want[items.OVERFLOW] > 0


@pytest.mark.parametrize("heads", [(8, 2), (32, 8)], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("num_sms", [1, 2, 16, 100, None])
def test_the_share_of_decode_ctas_follows_the_budget(num_sms, rows, heads):
    q_lens, lengths = [1, 1, 1] * rows + [500, 8], [5000, 300, 9000] * rows + [700, 40]
    num_sms = None if num_sms is None else at_most(num_sms)
    made = plan(
        lengths, starts(q_lens), heads=heads, max_q_len=500, max_kv_len=9000,
        num_tokens=sum(q_lens), num_sms=num_sms,
    )  # fmt: skip
    want = check(made, lengths, starts(q_lens))
    assert 1 <= want[items.DECODE_CTAS] <= made.budget.num_sms
    if num_sms is not None:
        assert made.budget.num_sms == num_sms


@pytest.mark.parametrize("heads", [(8, 2), (40, 1)], ids=str)
def test_an_empty_batch_and_requests_of_nothing(heads):
    made = plan([0, 0], [0, 0, 0], heads=heads, max_q_len=4, max_kv_len=16, num_tokens=0)
    want = check(made, [0, 0], [0, 0, 0])
    assert not want[[items.NUM_DECODE, items.NUM_PREFILL]].any()


def test_a_thousand_requests():
    chance = random.Random(fresh_seed())
    q_lens = [chance.choice([0, 1, 1, 4, 20]) for _ in range(3000)]
    lengths = [q + chance.randrange(3000) for q in q_lens]
    made = plan(lengths, starts(q_lens), max_q_len=20, max_kv_len=4000, num_tokens=sum(q_lens))
    check(made, lengths, starts(q_lens))


def test_refilled_on_the_device_without_a_host_read():
    """No call of a refill waits for the device: it is launched while the device is held up."""
    lengths = int32([300, 40])
    given = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16,
             "max_kv_len": 4096}  # fmt: skip
    made = smkern.plan_attention(lengths, **given)
    lengths.add_(0)  # loaded now: loading waits for the device
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    event = torch.cuda.Event()
    lengths.add_(1000)
    smkern.plan_attention(lengths, out=made, **given)
    event.record()
    assert not event.query(), "the refill waited for the device"
    torch.cuda.synchronize()
    check(made, [1300, 1040])
