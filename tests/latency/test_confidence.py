"""How far off predictions are said to be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smkern.latency import Chunk, Size, TablePredictor
from smkern.latency.confidence import AT_A_CELL, MOST, TOLD
from tests.latency.small import LAYERS, PROFILE, SIZES, TIMINGS

PREDICTOR = TablePredictor(TIMINGS, SIZES, PROFILE)


def decode(batch: int, context: int) -> Size:
    return Size(batch=batch, total_kv=batch * context)


def test_the_nearer_the_surer() -> None:
    near = PREDICTOR.confidence(decode(64, 1024), 20)
    assert near == pytest.approx(AT_A_CELL)
    assert PREDICTOR.confidence(decode(48, 1024), 20) > near
    assert PREDICTOR.confidence(decode(256, 9000), 60) > PREDICTOR.confidence(decode(48, 1024), 20)
    mixed = replace(decode(4, 9), chunks=(Chunk(4),), layers=LAYERS, num_layers=LAYERS)
    assert PREDICTOR.confidence(mixed, 20) == MOST  # none was timed


def test_what_is_told_from_another_model_or_gpu_is_less_sure() -> None:
    step, facts = decode(64, 1024), PROFILE.info

    def error(sizes: Any = SIZES, **changed: Any) -> float:
        there = replace(PROFILE, info=replace(facts, **changed))
        return PREDICTOR.for_model(sizes, there).confidence(step, 20)

    assert error(driver="another") == pytest.approx(AT_A_CELL)
    changes: list[dict[str, Any]] = [
        {"name": "H800"}, {"num_sms": facts.num_sms - 18}, {"sizes": replace(SIZES, num_layers=8)},
    ]  # fmt: skip
    for changed in changes:
        assert error(**changed) == pytest.approx(TOLD)
    assert error(capability=(10, 0)) == MOST
    elsewhere = PREDICTOR.for_model(SIZES, replace(PROFILE, info=replace(facts, name="H800")))
    assert elsewhere.for_model(SIZES, PROFILE).confidence(step, 20) == pytest.approx(TOLD)
