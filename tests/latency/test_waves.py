"""Idle SM cycles of the last wave, against the table of Bullet's paper."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ArgumentError
from smkern.latency.waves import idle_ratio

A100 = 108


def tiles(rows: int, columns: int) -> int:
    """Of 128 x 256, whole."""
    return (rows // 128) * (columns // 256)


# Llama-3.1-8B: 6,144 columns of QKV, 4,096 of O; attention has a block for 128 queries of each of
# 32 heads. The table's column for the MLP mixes its products in proportions that it does not give.
@pytest.mark.parametrize(
    ("tokens", "qkv", "attention", "o"),
    [
        (1024, 11.1, 21.0, 40.7),
        (2048, 11.1, 5.2, 21.0),
        (4096, 11.1, 5.2, 5.2),
        (16384, 1.9, 0.2, 0.2),
    ],
)
def test_table_2_of_bullet(tokens: int, qkv: float, attention: float, o: float) -> None:
    blocks = (tiles(tokens, 6144), 32 * tokens // 128, tiles(tokens, 4096))
    got = [100 * idle_ratio(count, A100) for count in blocks]
    assert got == pytest.approx([qkv, attention, o], abs=0.05)


def test_blocks_that_share_an_sm() -> None:
    # 5 blocks, 2 an SM, 2 SMs: 2 waves, of the second ceil(2.5 - 2) = 1 SM
    assert idle_ratio(5, 2, blocks_per_sm=2) == pytest.approx(1 / 4)


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 4))
def test_a_share_is_idle_none_where_waves_are_full(blocks: int, sms: int, each: int) -> None:
    assert 0 <= idle_ratio(blocks, sms, blocks_per_sm=each) < 1
    assert idle_ratio(blocks * sms * each, sms, blocks_per_sm=each) == 0


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_counts_below_one_are_refused(counts: tuple[int, int, int]) -> None:
    blocks, sms, each = counts
    with pytest.raises(ArgumentError, match=f"num_sms={sms}.* each is 1 or more"):
        idle_ratio(blocks, sms, blocks_per_sm=each)
