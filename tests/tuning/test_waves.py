"""Wave arithmetic against brute force and against Bullet's Table 2."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.tuning.cost_model import Waves, streamed_tiles, waves


def deal(tiles: int, ctas_per_sm: int, num_sms: int) -> Waves:
    """Fill SMs with thread blocks, wave by wave, and count."""
    count, active, busy = 0, 0, 0
    while tiles:
        count, active = count + 1, 0
        for _ in range(num_sms):
            taken = min(tiles, ctas_per_sm)
            tiles -= taken
            active += taken > 0
        busy += active
    slots = num_sms * count
    return Waves(count, active, (slots - busy) / slots if slots else 0.0)


@given(st.integers(0, 3000), st.integers(1, 4), st.integers(1, 132))
def test_waves_equal_dealing_blocks_one_by_one(tiles, ctas_per_sm, num_sms):
    expected, found = deal(tiles, ctas_per_sm, num_sms), waves(tiles, ctas_per_sm, num_sms)
    assert (found.waves, found.tail) == (expected.waves, expected.tail)
    assert found.idle == pytest.approx(expected.idle)


BULLET_TABLE_2 = {
    # rows: idle share in percent of the QKV projection, attention and the O projection
    1024: (11.1, 21.0, 40.7),
    2048: (11.1, 5.2, 21.0),
    4096: (11.1, 5.2, 5.2),
    16384: (1.9, 0.2, 0.2),
}


@pytest.mark.parametrize("rows", BULLET_TABLE_2)
def test_bullet_table_2(rows):
    """Llama-3.1-8B on 108 SMs, tiles of 128x256; attention: a block a head and 128 queries."""
    tiles = (rows // 128 * (6144 // 256), rows // 128 * 32, rows // 128 * (4096 // 256))
    idle = tuple(round(100 * waves(count, 1, 108).idle, 1) for count in tiles)
    assert idle == BULLET_TABLE_2[rows]


@given(st.integers(1, 3000), st.integers(1, 264))
def test_stream_k_leaves_whole_waves_and_cuts_few_pieces(tiles, ctas):
    streamed = streamed_tiles(tiles, ctas)
    assert (tiles - streamed) % ctas == 0
    assert streamed < 2 * ctas
    if tiles > ctas and streamed:
        assert ctas <= 4 * streamed, "a tile must not be cut into more than about four pieces"
