"""Times of a model's GEMMs by the tuned tables, as a profile notes them."""

from __future__ import annotations

import pickle

import pytest

from smkern.latency.gemm_times import ROWS
from smkern.latency.model_gemms import gemm_times, problems_of
from smkern.models import preset
from smkern.profile import load_profile
from smkern.tuning.config import Epilogue

pytestmark = pytest.mark.slow


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
    assert problems_of(biased, 64, 1)[0].epilogue == Epilogue(bias=True)
    want, got = (gemm_times(x, load_profile("h200"), [32, 132]) for x in (plain, biased))
    assert want is not None
    assert got is not None
    for at in range(2):
        for one, other in zip(want.layer_us[at], got.layer_us[at], strict=True):
            assert other == pytest.approx(one, rel=0.15)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-8b-fp8"])
def test_products_of_experts_and_of_e4m3_are_not_told_apart(model: str) -> None:
    assert gemm_times(preset(model), load_profile("h200")) is None
