"""A plan's items: every visible key of every row once, places of their own, sizes within bounds."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.kernels.attention import items
from smkern.kernels.attention.args import ALIGNMENT, WorkspaceLayout
from smkern.kernels.attention.items import PlanLayout, plan_items
from smkern.tuning.attention.shapes import (
    DECODE_MAX_Q,
    PIECE_COST,
    PREFILL_ROWS,
    PREFILL_TILE,
    AttentionShape,
    bundles_of,
)

pytestmark = pytest.mark.slow

LENGTHS = st.one_of(st.integers(0, 600), st.integers(0, 50_000), st.integers(16_000, 50_000))
QUERIES = st.one_of(st.integers(0, DECODE_MAX_Q), st.integers(0, 700))
CUT = [
    items.KV_BEGIN, items.KV_END, items.KV_LEN, items.Q_LEN, items.FIRST_ROW, items.NUM_PIECES,
    items.PIECE,
]  # fmt: skip


@st.composite
def steps(draw: st.DrawFn) -> tuple[AttentionShape, list[int], list[int]]:
    """A shape, kv_lens and cu_q_lens within it, often with no room to spare."""
    requests = draw(st.lists(st.tuples(QUERIES, LENGTHS), min_size=1, max_size=6))
    kv_heads = draw(st.sampled_from([1, 2, 8]))
    group = draw(st.sampled_from([1, 4, 5, 8, 40]))
    spare = draw(st.sampled_from([0, 0, 300]))
    kv_lens = [kv_len for _, kv_len in requests]
    cu_q_lens = np.cumsum([0, *(q_len for q_len, _ in requests)]).tolist()
    shape = AttentionShape(
        batch=len(requests),
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 256])),
        page_size=16,
        max_q_len=max(1, *(q_len for q_len, _ in requests)) + spare,
        max_kv_len=max(1, *kv_lens) + spare,
        max_tokens=max(1, cu_q_lens[-1]) + spare,
        max_total_kv=sum(kv_lens) + spare,
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([0, 1, 100, 5000])),
    )
    return shape, kv_lens, cu_q_lens


def read(shape: AttentionShape, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The decode and the prefill items [n, ITEM_WORDS] of a plan."""
    layout = PlanLayout.of(shape)
    found = []
    for at, word in ((layout.decode_at, items.NUM_DECODE), (layout.prefill_at, items.NUM_PREFILL)):
        words = buffer[at : at + buffer[word] * items.ITEM_WORDS]
        found.append(words.reshape(-1, items.ITEM_WORDS))
    return found[0], found[1]


def seen_by(shape: AttentionShape, q_len: int, kv_len: int, token: int) -> tuple[int, int]:
    position = kv_len - q_len + token
    end = min(kv_len, max(position + 1, 0)) if shape.causal else kv_len
    begin = max(0, position - shape.window + 1) if shape.window else 0
    return min(begin, end), end


@given(steps())
def test_every_row_meets_each_visible_key_once(step):
    shape, kv_lens, cu_q_lens = step
    ranges, block_of = defaultdict(list), {}
    decode, prefill = read(shape, plan_items(shape, kv_lens, cu_q_lens, 7))
    for block, found in ((shape.decode_rows, decode), (PREFILL_ROWS, prefill)):
        for item in found.tolist():
            request, first_row = item[items.REQUEST], item[items.FIRST_ROW]
            assert item[items.Q_START] == cu_q_lens[request]
            assert item[items.KV_LEN] == kv_lens[request]
            assert first_row % block == 0
            block_of[request] = block
            ranges[request, first_row].append((item[items.KV_BEGIN], item[items.KV_END]))
    for request, kv_len in enumerate(kv_lens):
        q_len = cu_q_lens[request + 1] - cu_q_lens[request]
        rows, block = q_len * shape.group, block_of.get(request, 1)
        for first in range(0, rows, block):
            mine = sorted(ranges.pop((request, first)))
            assert all(left[1] == right[0] for left, right in pairwise(mine))
            tokens = range(first // shape.group, -(-min(first + block, rows) // shape.group))
            seen = [seen_by(shape, q_len, kv_len, token) for token in tokens]
            seen = [(begin, end) for begin, end in seen if begin < end]
            if seen:
                assert mine[0][0] <= seen[0][0]
                assert seen[-1][1] <= mine[-1][1] <= kv_len
    assert not ranges


@given(steps())
def test_partials_and_counters_have_places_of_their_own(step):
    shape, kv_lens, cu_q_lens = step
    buffer = plan_items(shape, kv_lens, cu_q_lens, 7)
    counters = Counter()
    for word, found in zip(
        (items.DECODE_SLOTS, items.PREFILL_SLOTS), read(shape, buffer), strict=True
    ):
        cut = found[found[:, items.NUM_PIECES] > 1]
        slots = (cut[:, items.FIRST_SLOT] + cut[:, items.PIECE]).tolist()
        whole = found[found[:, items.NUM_PIECES] == 1]
        assert (whole[:, items.FIRST_SLOT] == -1).all()
        blocks = {
            (item[items.COUNTER], item[items.REQUEST], item[items.FIRST_ROW]): (
                item[items.NUM_PIECES], item[items.FIRST_SLOT],
            )
            for item in cut.tolist()
        }  # fmt: skip
        assert sum(pieces for pieces, _ in blocks.values()) == len(cut)
        for (counter, _, _), (pieces, first) in blocks.items():
            bundles = bundles_of(pieces) if word == items.DECODE_SLOTS else 0
            slots.extend(first + pieces + i for i in range(bundles))
            counters.update(counter + i for i in range(1 + bundles))
        assert sorted(slots) == list(range(buffer[word]))
    assert sorted(counters) == list(range(len(counters)))
    assert set(counters.values()) <= {1}
    assert len(counters) <= PlanLayout.of(shape).num_counters


@given(steps())
def test_nothing_exceeds_what_the_shape_allows(step):
    shape, kv_lens, cu_q_lens = step
    buffer = plan_items(shape, kv_lens, cu_q_lens, 7)
    assert buffer[items.OVERFLOW] == 0
    assert buffer[items.NUM_DECODE] <= shape.max_decode_items
    assert buffer[items.NUM_PREFILL] <= shape.max_prefill_items
    assert 0 <= buffer[items.DECODE_CTAS] <= 7
    space = WorkspaceLayout.of(shape)
    ends = (space.decode_stats, space.prefill_stats)
    begins = (space.decode_out, space.prefill_out)
    words = (items.DECODE_SLOTS, items.PREFILL_SLOTS)
    blocks = (shape.decode_rows, PREFILL_ROWS)
    for begin, end, word, block in zip(begins, ends, words, blocks, strict=True):
        partial = 4 * shape.num_kv_heads * block * shape.head_dim
        assert buffer[word] * partial <= end - begin
        assert begin % ALIGNMENT == 0


@pytest.mark.parametrize(
    ("rows", "tokens", "cached", "num_ctas", "want"),
    [
        ((64, 2048), 400, 1848, 132, 48),  # by time 83: memory gives no more than to 48
        ((64, 2048), 400, 1848, 48, 31),  # by time
        ((64, 2048), 2048, 2048, 132, 26),
        ((16, 16_384), 400, 1848, 132, 43),  # longer pieces
        ((256, 100), 400, 0, 132, 77),  # a request's end reads nothing
        ((64, 2048), 128, 1900, 132, 100),  # 4 row blocks of 8 heads: more would have nothing to do
        ((64, 2048), 128, 1900, 48, 41),
        ((64, 2048), 1, 2048, 132, 132),
        ((64, 2048), 4096, 30_000, 2, 1),
        ((64, 2048), 4096, 30_000, 1, 1),
    ],
)
def test_ctas_that_begin_with_decode(rows, tokens, cached, num_ctas, want):
    """Of 32 heads on 8 KV heads."""
    assert _decode_ctas(rows, tokens, cached, num_ctas, (32, 8)) == want


def test_row_blocks_that_share_keys_read_them_once():
    wanted = {(8, 1): 48, (16, 1): 96, (16, 2): 48}
    for heads, want in wanted.items():
        assert _decode_ctas((1024, 2048), 2048, 0, 132, heads) == want


def _decode_ctas(
    rows: tuple[int, int], tokens: int, cached: int, num_ctas: int, heads: tuple[int, int]
) -> int:
    """Of so many decode rows of so many keys each, beside a chunk."""
    batch, keys = rows
    lengths = [keys] * batch + [tokens + cached]
    shape = AttentionShape(
        batch + 1, *heads, 128, 16, tokens, max(lengths), batch + tokens, sum(lengths)
    )
    buffer = plan_items(shape, lengths, [*range(batch + 1), batch + tokens], num_ctas)
    return int(buffer[items.DECODE_CTAS])


@given(steps(), st.integers(1, 200))
def test_no_cta_is_without_work(step, num_ctas):
    shape, kv_lens, cu_q_lens = step
    buffer = plan_items(shape, kv_lens, cu_q_lens, num_ctas)
    decode, units = buffer[items.DECODE_CTAS], buffer[items.NUM_PREFILL] * shape.num_kv_heads
    assert (decode > 0) == (buffer[items.NUM_DECODE] > 0)
    if decode:
        assert num_ctas - decode <= units


@given(steps())
def test_prefill_items_are_ordered_longest_first(step):
    shape, kv_lens, cu_q_lens = step
    _, prefill = read(shape, plan_items(shape, kv_lens, cu_q_lens, 7))
    assert (np.diff(prefill[:, items.TILES]) <= 0).all()
    assert (prefill[:, items.KV_BEGIN] % PREFILL_TILE == 0).all()


@given(steps(), st.integers(0, 5))
def test_a_request_is_cut_as_if_it_were_alone(step, index):
    shape, kv_lens, cu_q_lens = step
    request = index % shape.batch
    q_len = cu_q_lens[request + 1] - cu_q_lens[request]
    everyone = read(shape, plan_items(shape, kv_lens, cu_q_lens, 7))
    mine_alone = [0] * shape.batch
    mine_alone[0] = kv_lens[request]
    alone = read(shape, plan_items(shape, mine_alone, [0] + [q_len] * shape.batch, 132))
    for among, own in zip(everyone, alone, strict=True):
        of_request = among[among[:, items.REQUEST] == request][:, CUT].tolist()
        assert sorted(of_request) == sorted(own[:, CUT].tolist())


@given(steps())
def test_costs_add_up(step):
    shape, kv_lens, cu_q_lens = step
    plan = plan_items(shape, kv_lens, cu_q_lens, 7)
    decode, _ = read(shape, plan)
    tiles = -(-(decode[:, items.KV_END] - decode[:, items.KV_BEGIN]) // PREFILL_TILE)
    costs = np.maximum(tiles, 1) + PIECE_COST  # one without keys takes a step all the same
    assert decode[:, items.COST].tolist() == (np.cumsum(costs) - costs).tolist()
    assert plan[items.DECODE_COST] == costs.sum()
    assert plan[items.FIRST_COST] == (costs[0] if len(costs) else 0)
    # a team's share is found in a row block by its cost: all pieces but the last cost the same
    inner = decode[:, items.PIECE] < decode[:, items.NUM_PIECES] - 1
    first = np.flatnonzero(inner) - decode[inner, items.PIECE]
    assert (costs[inner] == costs[first]).all()


@pytest.mark.parametrize(
    ("kv_len", "pieces", "last"),
    [
        (0, 1, (0, 0)),
        (1, 1, (0, 1)),
        (640, 1, (0, 640)),
        (641, 2, (512, 641)),
        (2048, 4, (1536, 2048)),
        (2049, 4, (1536, 2049)),
        (2176, 4, (1536, 2176)),
        (2177, 5, (2048, 2177)),
        (3072, 6, (2560, 3072)),
        (3073, 3, (2048, 3073)),
        (3328, 3, (2048, 3328)),
        (3329, 4, (3072, 3329)),
        (65_536, 64, (64_512, 65_536)),
        (65_537, 64, (64_512, 65_537)),
        (65_792, 64, (64_512, 65_792)),
        (65_793, 65, (65_536, 65_793)),
        (131_073, 64, (129_024, 131_073)),
    ],
)
def test_a_rest_of_a_quarter_piece_joins_the_last_piece(kv_len, pieces, last):
    shape = AttentionShape(1, 4, 1, 64, 16, 1, 140_000, 1, 140_000)
    decode, _ = read(shape, plan_items(shape, [kv_len], None, 4))
    assert decode[:, items.NUM_PIECES].tolist() == [pieces] * pieces
    assert tuple(decode[-1, [items.KV_BEGIN, items.KV_END]]) == last
    whole = decode[:-1, items.KV_END] - decode[:-1, items.KV_BEGIN]
    assert (whole == (512 if kv_len <= 3072 else 1024 if kv_len <= 131_072 else 2048)).all()


def test_more_than_sixteen_pieces_are_bundled_by_eight():
    assert [bundles_of(n) for n in (1, 16, 17, 24, 25, 128)] == [0, 0, 3, 3, 4, 16]
    shape = AttentionShape(2, 16, 1, 64, 16, 2, 20_000, 3, 40_000)
    decode, _ = read(shape, plan_items(shape, [20_000, 20_000], [0, 1, 3], 4))
    first = decode[decode[:, items.PIECE] == 0]
    # 20 pieces and 3 bundles a row block of 16 rows, of which two query tokens have two
    assert first[:, items.FIRST_SLOT].tolist() == [0, 23, 46]
    assert first[:, items.COUNTER].tolist() == [0, 4, 8]


@pytest.mark.parametrize(("window", "first"), [(10, 1536), (100, 1536), (600, 1024), (0, 0)])
def test_a_window_that_begins_in_a_rest_is_in_the_last_piece(window, first):
    shape = AttentionShape(1, 4, 1, 64, 16, 1, 4096, 1, 4096, window=window)
    decode, _ = read(shape, plan_items(shape, [2100], None, 4))
    assert decode[0, items.KV_BEGIN] == first
    assert decode[-1, items.KV_END] == 2100


def test_lengths_outside_the_shape_are_clamped():
    shape = AttentionShape(2, 4, 1, 64, 16, 2, 100, 3, 200)
    decode, _ = read(shape, plan_items(shape, [5000, -3], [-7, 2, 99], 4))
    assert decode[:, items.KV_LEN].tolist() == [100, 0]
    assert decode[:, items.Q_START].tolist() == [0, 2]
    assert decode[:, items.Q_LEN].tolist() == [2, 1]


def test_without_cu_q_lens_each_request_has_one_token():
    shape = AttentionShape(3, 4, 1, 64, 16, 1, 100, 3, 300)
    one = plan_items(shape, [7, 0, 90], None, 4)
    assert np.array_equal(one, plan_items(shape, [7, 0, 90], [0, 1, 2, 3], 4))
