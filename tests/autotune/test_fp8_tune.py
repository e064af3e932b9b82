"""Tuning GEMMs of e4m3: what is measured, and what results are held against."""

from __future__ import annotations

from collections import Counter

import torch

from smkern.autotune import fp8
from smkern.autotune.raw import Measurement
from smkern.device import Budget
from smkern.ops.fp8.dispatch import offline_dispatcher
from smkern.ops.reference.fp8 import dequantize
from smkern.profile import load_profile
from smkern.tuning.config import GemmConfig
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


def test_of_cutlass_tiles_that_are_as_fast_the_model_chooses():
    ours = GemmConfig("ws", 128, 128, 64, 8, 6)
    small, large = (GemmConfig("cutlass", 64, 128 * x, 64, 4 * x, 5) for x in (1, 2))
    problem = ScaledProblem(4096, 6144, 4096, scales="block")
    times = {ours: (100.0, 100.0), small: (90.0, 95.0), large: (91.0, 92.0)}
    found = [Measurement(problem, BUDGET, x, us, 0.0, told) for x, (us, told) in times.items()]
    cell = fp8.best(found)
    assert cell is not None
    assert (cell.config, cell.us, cell.own) == (large, 91.0, ours)
