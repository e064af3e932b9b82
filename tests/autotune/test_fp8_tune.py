"""Tuning GEMMs of e4m3: what is measured, and what results are held against."""

from __future__ import annotations

from collections import Counter

import torch

from smkern.autotune import fp8
from smkern.device import Budget
from smkern.ops.fp8.dispatch import offline_dispatcher
from smkern.ops.reference.fp8 import dequantize
from smkern.profile import load_profile
from smkern.tuning.fp8 import ScaledProblem, choose

H200 = load_profile("h200")
BUDGET = Budget(24, "mask", False)


def test_the_models_choice_comes_first_and_other_tiles_get_a_chance():
    problem = ScaledProblem(64, 6144, 4096, scales="block")
    found = fp8.listed(problem, BUDGET, H200, 8)
    assert next(iter(found)) == choose(problem, BUDGET, H200)
    tiles = Counter((x.block_m, x.block_n, x.swap, x.ctas_per_sm) for x in list(found)[:8])
    assert max(tiles.values()) <= fp8.MAX_OF_A_TILE
    assert len(tiles) >= 4
    first = list(found)[:2]
    assert all(any(y.overlap != x.overlap and y != x for y in found) for x in first)


def test_rows_of_a_shape_share_their_operands(monkeypatch):
    monkeypatch.setattr(fp8, "sets_for", lambda *_, **__: 2)
    cases = fp8.cases_of([(256, 384)], [5, 40])[:2]
    assert len({case.operands for case in cases}) == 1
    tuner = fp8.ScaledTuner(cases, offline_dispatcher(H200), "cpu")
    small, large = (case.problem for case in cases)
    (few,), (many,) = tuner.expected(small), tuner.expected(large)
    assert torch.allclose(few, many[:5], atol=1e-4)
    a, scale = tuner.a
    assert torch.allclose(many, dequantize(a, scale) @ dequantize(*tuner.w[0]).T)
    tuner.poison(small)
    assert tuner.results(small)[0].isnan().all()
