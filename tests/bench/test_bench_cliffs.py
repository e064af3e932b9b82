from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.bench.cliff_rules import judge, per_sm, slower, to_measure_again, uneven
from smkern.bench.cliffs import even_budgets, summarize
from tests.bench.synthetic import cell

LINEAR = {n: 1000.0 / n for n in range(16, 134, 2)}


def test_perfect_scaling_has_no_cliff():
    verdict = judge(LINEAR, dict.fromkeys(LINEAR, 0.9))
    assert verdict["met"]
    assert verdict["met_of_ceiling"]
    assert to_measure_again(LINEAR) == set()


def test_a_budget_slower_than_a_smaller_one_is_named():
    us = {16: 10.0, 18: 9.0, 20: 9.17, 22: 9.3}
    assert slower(us) == {22: pytest.approx(1.0333)}
    assert {16, 18, 22} <= to_measure_again(us)


def test_the_bar_is_lower_above_60_sms():
    us = {30: 100.0, 60: 100.0 * 30 / 60 / 0.85, 90: 100.0 * 30 / 90 / 0.85}
    assert set(uneven(us)) == {60}


def test_where_bandwidth_binds_the_rate_per_sm_falls_but_not_the_fraction():
    flat = {48: 10.0, 96: 10.0}
    verdict = judge(flat, {48: 0.9, 96: 0.9})
    assert not verdict["met"]
    assert verdict["met_of_ceiling"]
    assert verdict["worst_per_sm_above_60"] == 0.5


@given(st.dictionaries(st.integers(2, 132), st.floats(1.0, 1e4), min_size=1))
def test_brute_force(us):
    for num_sms in us:
        smaller = [us[n] for n in us if n < num_sms]
        assert (num_sms in slower(us)) == any(us[num_sms] > 1.02 * other for other in smaller)
    assert max(per_sm(us).values()) >= 1.0


def test_even_budgets_end_at_the_device():
    budgets = even_budgets(132)
    assert len(budgets) == 59
    assert (budgets[0], budgets[-1]) == (16, 132)
    assert even_budgets(16) == (16,)


def test_the_second_measurement_counts():
    cells = [
        cell(op="gemm_cliffs", num_sms=16, us=100.0, fraction_of_ceiling=0.8),
        cell(op="gemm_cliffs", num_sms=18, us=110.0, us_again=91.0, fraction_of_ceiling=0.7),
        cell(op="gemm_cliffs", num_sms=20, us=None),
    ]
    summary = summarize(cells)
    assert (summary["met"], summary["of"]) == (1, 1)
    (verdict,) = summary["cases"].values()
    assert verdict["budgets"] == 2
