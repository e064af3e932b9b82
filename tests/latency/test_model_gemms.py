"""Times of a model's GEMMs by the tuned tables, as a profile notes them."""

from __future__ import annotations

import pickle

import pytest

from smkern.latency.gemm_times import ROWS
from smkern.latency.model_gemms import gemm_times, problems_of, scaled_problems_of
from smkern.models import Quantization, preset
from smkern.profile import load_profile
from smkern.tuning.config import Epilogue

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_the_extra(monkeypatch, tmp_path) -> None:
    """No kernels of CUTLASS that this machine happens to keep."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_gemms_of_a_model_go_up_a_stair() -> None:
    small = preset("qwen3-8b").replace(
        num_layers=1, hidden_size=1024, num_q_heads=8, num_kv_heads=2, intermediate_size=3072,
        vocab_size=32_000,
    )  # fmt: skip
    # As a process of its own is given it.
    times, *given = pickle.loads(pickle.dumps((gemm_times, small, load_profile("h200"))))
    found = times(*given, [12, 100])
    assert found is not None
    assert found.us(130, 0, 1, 100) == found.us(144, 0, 1, 100)
    assert found.us(144, 0, 36, 100) == pytest.approx(36 * found.us(144, 0, 1, 100))
    assert found.us(144, 64, 1, 100) > found.us(144, 0, 1, 100)
    assert found.us(4096, 0, 1, 100) < found.us(4100, 0, 1, 100) < found.us(4352, 0, 1, 100)
    assert found.us(2 * ROWS[-1], 0, 1, 13) == pytest.approx(2 * found.us(ROWS[-1], 0, 1, 12))


def test_a_bias_costs_what_the_plain_product_does() -> None:
    """It has no cells of its own here: those without a bias serve it, by our own kernels."""
    plain = preset("llama-3.1-8b")
    biased = plain.replace(architecture="qwen2")
    assert problems_of(biased, 64, 1)[1].epilogue == Epilogue(bias=True)
    want, got = (gemm_times(x, load_profile("h200"), [32, 132]) for x in (plain, biased))
    assert want is not None
    assert got is not None
    for at in range(2):
        for one, other in zip(want.layer_us[at], got.layer_us[at], strict=True):
            assert other == pytest.approx(one, rel=0.15)


def test_in_e4m3_they_take_more_than_half_and_less_than_all_of_the_time() -> None:
    """The head stays in the model's dtype; gate and up are one kernel with what follows from 257
    rows on, where they are scaled by blocks."""
    plain, blocks = preset("llama-3.1-8b"), Quantization("fp8-block")
    sms, profile = [16, 132], load_profile("h200")
    want = gemm_times(plain, profile, sms)
    by_blocks, by_rows = (
        gemm_times(plain.replace(quantization=x), profile, sms)
        for x in (blocks, Quantization("fp8-channel"))
    )
    assert want is not None
    for found in (by_blocks, by_rows):
        assert found is not None
        assert found.head_us == want.head_us
        for one, other in zip(want.layer_us, found.layer_us, strict=True):
            assert all(0.45 < y / x < 0.95 for x, y in zip(one, other, strict=True))
    assert by_blocks != by_rows
    fused = [
        [x.epilogue.swiglu for x in scaled_problems_of(config, rows, (9, 0))]
        for config in (plain.replace(quantization=blocks), plain)
        for rows in (256, 257)
    ]
    assert fused == [[False] * 4, [False, False, True, False], [], []]


def test_products_of_experts_are_not_told_apart() -> None:
    assert gemm_times(preset("qwen3-30b-a3b-fp8"), load_profile("h200")) is None
