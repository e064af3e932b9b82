"""Times of a model's GEMMs by the tuned tables, as a profile notes them."""

from __future__ import annotations

import pickle

import pytest

from smkern.latency.gemm_times import ROWS
from smkern.latency.model_gemms import gemm_times
from smkern.models import preset
from smkern.profile import load_profile


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


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "qwen3-8b-fp8"])
def test_products_of_experts_and_of_e4m3_are_not_told_apart(model: str) -> None:
    assert gemm_times(preset(model), load_profile("h200")) is None
