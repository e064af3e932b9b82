"""Host-side costs by pytest-benchmark, no GPU: run with `--benchmark-enable bench/micro`."""

from __future__ import annotations

import pytest

from smkern.device import Budget
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.profile import load_profile
from smkern.tuning import cost_model
from smkern.tuning.config import GemmProblem
from smkern.tuning.select import GEMM_FAMILY, select_gemm

PROBLEM = GemmProblem(512, 6144, 4096)
BUDGET = Budget(60, "mask", True)


@pytest.fixture(scope="module")
def profile():
    return load_profile("h200")


@pytest.fixture(scope="module")
def tables(profile):
    return GEMM_FAMILY.load(profile)


def test_choice_seen_before(benchmark, profile, tables):
    dispatcher = offline_dispatcher(profile, tables)
    dispatcher.select(PROBLEM, BUDGET)
    selection = benchmark(dispatcher.select, PROBLEM, BUDGET)
    assert selection.config.kernel


def test_table_lookup(benchmark, tables):
    benchmark(tables.lookup, PROBLEM, BUDGET, allow_cublaslt=True)


@pytest.mark.parametrize("m", [1, 64, 2048])
def test_choice_by_the_model(benchmark, profile, m):
    problem = GemmProblem(m, 6144, 4096)
    selection = benchmark(select_gemm, problem, BUDGET, profile, None)
    assert selection.source == "model"


def test_prediction_of_one_configuration(benchmark, profile):
    config = select_gemm(PROBLEM, BUDGET, profile, None).config
    assert benchmark(cost_model.predict_us, PROBLEM, config, BUDGET, profile) > 0
