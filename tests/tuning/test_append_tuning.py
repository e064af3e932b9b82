"""The append's model, choices and tuned cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern.tuning.append import (
    APPEND_FAMILY,
    WARPS,
    AppendConfig,
    AppendProblem,
    Budget,
    item_tokens,
    kv_count,
    num_items,
    predict_us,
    q_count,
)
from tests.ops.conftest import FakeProfile

BASE = AppendProblem(64, 64, 32, 8, 128, 16, rotary_dim=128, norm=True, ragged=True)
PROFILE = FakeProfile()


def test_bytes():
    token = (2 * 8 * (2 + 2) + 32 * 4) * 128 + 128 * 4
    assert BASE.bytes_moved == 64 * token
    assert replace(BASE, cache_dtype="fp8").bytes_moved == 64 * (token - 2 * 8 * 128)
    plain = replace(BASE, num_q_heads=0, rotary_dim=0)
    assert plain.bytes_moved == 64 * 2 * 8 * 128 * 4
    assert (BASE.op, plain.op) == ("qk_norm_rope_append", "append_kv")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("warps", WARPS)
@pytest.mark.parametrize("heads", [(32, 8), (4, 1), (14, 7), (40, 8), (64, 64), (0, 8), (28, 4)])
def test_items_use_every_lane_and_pad_little(head_dim, warps, heads):
    q_heads, kv_heads = heads
    problem = replace(BASE, head_dim=head_dim, num_q_heads=q_heads, num_kv_heads=kv_heads)
    config = AppendConfig(warps)
    tokens, count, q = item_tokens(problem, config), kv_count(problem), q_count(problem, config)
    lanes = 32 * warps
    for x in (tokens, count, q):
        assert x & (x - 1) == 0
    assert tokens * count * problem.half_lanes >= lanes
    assert tokens == 1 or tokens * count * problem.half_lanes == lanes
    assert q * tokens * problem.half_lanes <= 4 * max(lanes, tokens * problem.half_lanes)
    assert -(-q_heads // q) * q <= 1.2 * max(q_heads, 1)
    assert num_items(replace(problem, tokens=5 * tokens), config) == 5


def test_a_long_step_is_bound_by_memory():
    problem, budget = replace(BASE, tokens=8192), Budget(132, "mask")
    us = predict_us(problem, APPEND_FAMILY.choose(problem, budget, PROFILE), budget, PROFILE)
    assert problem.bytes_moved / 4.4e6 < us < 1.4 * problem.bytes_moved / 4.4e6
