"""A fuzzer's cases: as many as asked for, the same in every run."""

from __future__ import annotations

from itertools import islice

from tests.fuzz import conftest
from tests.fuzz.conftest import Cases


def numbers(cases: Cases, few: int) -> list[int]:
    return [random.randrange(1 << 60) for random in islice(cases(few), few)]


def test_a_run_has_its_few_cases_and_a_longer_one_begins_with_them(cases, monkeypatch):
    monkeypatch.setattr(conftest, "HOURS", 0.0)
    assert len({*numbers(cases, 9)}) == len([*cases(9)]) == 9
    assert numbers(cases, 9)[:4] == numbers(cases, 4)
    monkeypatch.setattr(conftest, "HOURS", -1.0)  # time is up
    assert numbers(cases, 9) == []


def test_a_case_can_be_run_again_by_its_number(cases, monkeypatch):
    monkeypatch.setattr(conftest, "FIRST", 0)
    first = numbers(cases, 6)
    monkeypatch.setattr(conftest, "FIRST", 5)
    assert numbers(cases, 1) == first[5:]
