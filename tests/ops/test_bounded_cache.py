"""What is kept by a call's numbers: bounded, and nothing that runs needs what was let go."""

from __future__ import annotations

import pytest
import torch

from smkern.errors import ArgumentError
from smkern.ops import bounded_cache
from smkern.ops.bounded_cache import keep, steps_to
from smkern.ops.gemm import dispatch
from smkern.tuning.config import Budget, GemmProblem

MASK = Budget(32, "mask", False)


@pytest.fixture
def most(monkeypatch) -> int:
    monkeypatch.setattr(bounded_cache, "MAX_CACHED", 8)
    return 8


def test_a_full_one_lets_the_older_half_go(most):
    found: dict[int, int] = {}
    for key in range(2 * most + 1):
        keep(found, key, -key)
        assert found[key] == -key
        newer = range(max(key - most // 2, 0), key + 1)
        assert len(found) <= most
        assert set(found) >= set(newer)


def test_what_cannot_be_a_key_is_an_argument_that_no_option_has(most):
    with pytest.raises(ArgumentError, match="no option has"):
        keep({}, [], 1)


def test_calls_of_more_sizes_than_are_kept(device, most):
    """A plan that was let go is made again; a launch in hand goes on without its entry."""
    w = torch.randn(64, 32, dtype=torch.bfloat16)
    first = device.dispatcher.plan(GemmProblem(3, 64, 32), MASK)
    for m in (*range(1, 3 * most), 1):
        a = torch.randn(m, 32, dtype=torch.bfloat16)
        want = (a.float() @ w.float().T).bfloat16()
        torch.testing.assert_close(device.gemm(a, w), want, rtol=0.02, atol=0.02)
    assert len(device.eager.records) <= most
    assert len(device.dispatcher._plans) <= most
    again = device.dispatcher.plan(GemmProblem(3, 64, 32), MASK)
    assert again is not first
    assert again.config == first.config


@pytest.fixture
def asked(monkeypatch) -> list[object]:
    """What the model was asked."""
    found, select = [], dispatch.select_gemm

    def counted(*args, **options):
        found.append(args)
        return select(*args, **options)

    monkeypatch.setattr(dispatch, "select_gemm", counted)
    return found


def test_many_rows_do_not_drive_out_the_models_choices(device, most, asked):
    for m in range(1025, 1025 + 3 * most):
        device.dispatcher.select(GemmProblem(m, 512, 1024), MASK)
    assert len(device.dispatcher._selections) <= most
    assert len(asked) == 1, "one step of rows"


def test_a_warmup_chooses_more_than_are_kept_of_plans():
    """A weight has a few hundred steps of rows in each of a ladder's budgets."""
    num_choices = len(range(20, 132, 8)) * len(steps_to(8192))
    assert bounded_cache.MAX_CACHED < num_choices < bounded_cache.MAX_CHOICES // 8


def test_what_a_warmup_chose_is_not_chosen_again(device, most, asked):
    budgets = [Budget(num_sms, "mask", True) for num_sms in (20, 124)]
    problems = [GemmProblem(m, 512, 1024) for m in steps_to(1024)]
    assert len(problems) > 2 * most
    for budget in budgets:
        for problem in problems:
            device.dispatcher.select(problem, budget)
    asked.clear()
    for budget in budgets:
        device.dispatcher.select(GemmProblem(1000, 512, 1024), budget)
    assert not asked
