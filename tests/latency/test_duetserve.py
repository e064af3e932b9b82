"""DuetServe's roofline against sums by hand: on 20 SMs 1 us is 10^6 bytes or 8 x 10^7 FLOPs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ProfileError
from smkern.latency import Chunk, Size
from smkern.latency.duetserve import DuetServe
from smkern.latency.sizes import ExpertSizes
from tests.latency.small import LAYERS, PROFILE, SIZES

SMS = 20
PAPER = DuetServe(SIZES, PROFILE)
CORRECTED = DuetServe(SIZES, PROFILE, corrected=True)
STEP = Size(layers=LAYERS, num_layers=LAYERS, batch=2, total_kv=20)
WIDE = replace(SIZES, q_size=2048, kv_size=512, qkv_size=3072, head_dim=256)
"""As many heads, twice as wide as hidden width / heads says."""


def prompt(new: int, cached: int = 0, *, layers: int = LAYERS, head: bool = True) -> Size:
    return Size((Chunk(new, cached),), layers, LAYERS, head)


def test_a_decode_step_of_the_paper() -> None:
    # memory bounds all of it: bytes over 10^6
    qkv, o = 2 * (2 * 1024 + 1024 * 3072 + 2 * 3072), 2 * (2 * 1024 + 1024 * 1024 + 2 * 1024)
    gate_up = 2 * (2 * 1024 + 1024 * 8192 + 2 * 8192)
    down = 2 * (2 * 4096 + 4096 * 1024 + 2 * 1024)
    gate, norms = 3 * 2 * 4096 * 2, 2 * (2 * 2 * 1024 * 2)
    # a query and its output in 8 heads, 10 keys and values in 2, for each row
    attention = 2 * (2 * 8 * 128 * 2 + 2 * 2 * 10 * 128 * 2)
    head = 2 * (2 * 1024 + 1024 * 32_000 + 2 * 32_000)
    block = qkv + o + gate_up + down + gate + norms + attention
    assert block == 33_730_560
    assert PAPER.alone_us(STEP, SMS) == pytest.approx((4 * block + head) / 1e6)


def test_a_decode_step_with_grouped_widths() -> None:
    # QKV has 1,024 + 2 x 256 columns
    less = 4 * 2 * (1024 + 2) * (3072 - 1536) / 1e6
    assert CORRECTED.alone_us(STEP, SMS) == pytest.approx(PAPER.alone_us(STEP, SMS) - less)


LINEAR_US = 78.6432 + 26.2144 + 209.7152 + 104.8576
"""QKV, O, gate and up, down of 1,000 tokens: 2 x 1,000 x 1,024 x 3,072 / 8e7 and so on."""
ELEMENTWISE_US = 24.576 + 2 * 4.096
"""The gate reads and writes 3 x 4,096 numbers a token, a norm 2 x 1,024: bytes over 10^6."""


def test_a_prompt_of_the_paper() -> None:
    # 1,000 new tokens behind 500: all 1,000 x 1,500 pairs of (4 x 128 + 2) x 8 FLOPs
    attention = 1000 * 1500 * 4112 / 8e7
    head = 2 * 1000 * 1024 * 32_000 / 8e7
    expected = 4 * (LINEAR_US + ELEMENTWISE_US + attention) + head
    assert expected == pytest.approx(2936.3936)
    assert PAPER.alone_us(prompt(1000, 500), SMS) == pytest.approx(expected)


def test_a_corrected_prompt() -> None:
    # half of QKV; visible pairs are 1,000 x 1,500 - 1,000 x 999 / 2; the head's bytes of one token
    attention = 1_000_500 * 4112 / 8e7
    head = 2 * (1024 + 1024 * 32_000 + 32_000) / 1e6
    expected = 4 * (LINEAR_US - 39.3216 + ELEMENTWISE_US + attention) + head
    assert CORRECTED.alone_us(prompt(1000, 500), SMS) == pytest.approx(expected)


def test_the_corrected_one_takes_the_model_s_own_head_dimension() -> None:
    wide = DuetServe(WIDE, PROFILE, corrected=True)
    attention = 1_000_500 * (4 * 256 + 2) * 8 / 8e7
    head = 2 * (1024 + 1024 * 32_000 + 32_000) / 1e6
    expected = 4 * (LINEAR_US + 26.2144 + ELEMENTWISE_US + attention) + head
    assert wide.alone_us(prompt(1000, 500), SMS) == pytest.approx(expected)
    as_written = DuetServe(WIDE, PROFILE).alone_us(prompt(1000, 500), SMS)
    assert as_written == pytest.approx(PAPER.alone_us(prompt(1000, 500), SMS))


def test_each_request_s_attention_is_its_own_roofline() -> None:
    both = Size((Chunk(500, 500), Chunk(500)), 1, LAYERS, False)
    # 500 x 1,000 and 500 x 500 pairs, all bound by FLOPs
    expected = LINEAR_US + ELEMENTWISE_US + 750_000 * 4112 / 8e7
    assert PAPER.alone_us(both, SMS) == pytest.approx(expected)


def test_layers_without_a_head() -> None:
    one = PAPER.alone_us(prompt(1000, 500, layers=1, head=False), SMS)
    assert PAPER.alone_us(prompt(1000, 500, layers=3, head=False), SMS) == pytest.approx(3 * one)


def test_a_gpu_s_part_of_a_model() -> None:
    part = DuetServe(SIZES.sharded(2), PROFILE, corrected=True)
    attention = 1_000_500 * 4112 / 8e7
    expected = (LINEAR_US - 39.3216 + 24.576 + attention) / 2 + 2 * 4.096
    got = part.alone_us(prompt(1000, 500, layers=1, head=False), SMS)
    assert got == pytest.approx(expected)


def test_experts_move_the_chosen_ones() -> None:
    sizes = replace(SIZES, moe=ExpertSizes(num_experts=8, top_k=2, intermediate_size=512))
    got = DuetServe(sizes, PROFILE).alone_us(STEP, SMS) - PAPER.alone_us(STEP, SMS)
    # 2 tokens meet 8 (1 - (3/4)^2) = 3.5 experts; 4 rows go through one each
    router = 2 * (2 * 1024 + 1024 * 8 + 2 * 8)
    up = 2 * (4 * (1024 + 1024) + 3.5 * 1024 * 1024)
    down = 2 * (4 * (512 + 1024) + 3.5 * 512 * 1024)
    gate = 3 * 4 * 512 * 2
    dense = 2 * (2 * 1024 + 1024 * 8192 + 2 * 8192) + 2 * (2 * 4096 + 4096 * 1024 + 2 * 1024)
    dense += 3 * 2 * 4096 * 2
    assert got == pytest.approx(4 * (router + up + down + gate - dense) / 1e6)


def test_contention_is_left_out() -> None:
    assert PAPER.slowdown(STEP, SMS, prompt(1000), 80) == 1.0


def test_nothing_takes_no_time() -> None:
    assert PAPER.alone_us(Size(), SMS) == 0.0


@given(st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 64), st.integers(1, 99))
def test_more_work_takes_longer_and_more_sms_do_not(new, cached, batch, num_sms) -> None:
    size = Size((Chunk(new, cached),), LAYERS, LAYERS, True, batch, 100 * batch)
    more = [
        replace(size, chunks=(Chunk(new + 1, cached),)),
        replace(size, chunks=(Chunk(new, cached + 1),)),
        replace(size, batch=batch + 1, total_kv=100 * batch + 100),
    ]
    for model in (PAPER, CORRECTED):
        us = model.alone_us(size, num_sms)
        assert all(model.alone_us(longer, num_sms) >= us for longer in more)
        assert model.alone_us(size, num_sms + 1) <= us * (1 + 1e-12)


def test_more_sms_than_the_device_has() -> None:
    with pytest.raises(ProfileError, match="num_sms=101"):
        PAPER.alone_us(STEP, 101)
