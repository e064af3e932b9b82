"""Figures of records made by hand; each number below is computed in its comment."""

from __future__ import annotations

import json
from array import array
from math import inf

import pytest

from smkern.replay import (
    Arrival,
    BulletCriterion,
    DriftCriterion,
    MuxWiseCriterion,
    Record,
    Report,
    Served,
    Slo,
    Spread,
    Trace,
)


def record(at_s: float, prompt: int, *tokens: float, output: int = 3, new: int | None = None):
    """A request whose tokens came so long after it."""
    times = array("d", [at_s + after for after in tokens])
    return Record(at_s, prompt, prompt if new is None else new, output, 1.0, times)


def served(*records: Record, warm_s: float = 0.0, end_s: float = 100.0) -> Served:
    trace = Trace("t", tuple(Arrival(x.at_s, x.prompt_tokens, x.output_tokens) for x in records))
    return Served("p", trace, list(records), warm_s, end_s)


FOUR = (
    record(0.0, 100, 0.1, 0.11, 0.14),  # gaps 10, 30 ms
    record(1.0, 400, 0.2, 0.22, 0.24),  # gaps 20, 20 ms
    record(2.0, 1000, 1.5, 1.55, 1.56),  # late by its limit of 1 s; gaps 50, 10 ms
    record(3.0, 200, 0.3, 0.31),  # its third token never came; gap 10 ms
)


def test_percentiles_are_values_of_the_sample() -> None:
    spread = Spread.of([0.001 * n for n in range(1, 101)])
    assert (spread.count, spread.p50, spread.p90, spread.p99) == (100, 50.0, 90.0, 99.0)
    assert spread.mean == pytest.approx(50.5)
    assert Spread.of([]) == Spread()
    never = Spread.of([0.001, inf])
    assert (never.p50, never.p99, never.mean) == (1.0, inf, inf)
    assert never.to_json() == {"count": 2, "mean": None, "p50": 1.0, "p90": None, "p99": None}


def test_a_report_by_hand() -> None:
    report = Report.of(served(*FOUR), Slo(25.0))
    assert (report.requests, report.unfinished) == (4, 1)
    assert report.tbt_ms.mean == pytest.approx(150 / 7)
    assert report.tbt_ms.p99 == pytest.approx(50.0)
    assert report.worst_gap_ms.mean == pytest.approx((30 + 20 + 50 + 10) / 4)
    assert report.tpot_ms.mean == pytest.approx((20 + 20 + 30 + 10) / 4)
    assert report.ttft_ms.mean == pytest.approx((100 + 200 + 1500 + 300) / 4)
    assert report.end_to_end_ms.mean == pytest.approx((140 + 240 + 1560) / 3)
    assert report.tbt_kept == pytest.approx(5 / 7)
    assert report.ttft_kept == pytest.approx(3 / 4)
    # the last token of all came at 3.56 s; three finished, eleven tokens
    assert report.requests_per_s == pytest.approx(3 / 3.56)
    assert report.tokens_per_s == pytest.approx(11 / 3.56)
    assert [most for most, _, _ in report.by_prompt] == [100, 200, 400, 1000]
    assert report.by_prompt[3][1].p50 == pytest.approx(1500.0)
    json.dumps(report.to_json(), allow_nan=False)


def test_the_papers_own_figures_by_hand() -> None:
    papers = Report.of(served(*FOUR)).papers
    assert papers["muxwise_tbt_p99_ms"] == pytest.approx(50.0)
    # TTFT by prompt token: 1.0, 0.5, 1.5, 1.5 ms
    assert papers["bullet_ttft_p90_ms_per_token"] == pytest.approx(1.5)
    assert papers["bullet_tpot_p90_ms"] == pytest.approx(30.0)
    assert papers["duetserve_ttft_mean_ms"] == pytest.approx(525.0)
    # 100 ms for 100 new tokens and 200 ms for 400 are within 1 ms each; the others are not
    assert papers["drift_ttft_kept"] == pytest.approx(0.5)


def test_the_papers_criteria() -> None:
    found = served(*FOUR)
    assert MuxWiseCriterion(50.5).is_met(found)
    assert not MuxWiseCriterion(49.5).is_met(found)
    assert BulletCriterion(1.51, 30.5).is_met(found)
    assert not BulletCriterion(1.49, 30.5).is_met(found)
    assert not BulletCriterion(1.51, 29.5).is_met(found)
    assert not DriftCriterion(60.0).is_met(found)
    assert DriftCriterion(60.0).is_met(served(*FOUR[:2]))


def test_warm_up_and_what_was_refused() -> None:
    refused = record(5.0, 50)
    refused.error = "too long"
    report = Report.of(served(*FOUR, refused, warm_s=2.0), Slo(25.0))
    assert (report.requests, report.unfinished) == (3, 2)
    assert report.ttft_kept == pytest.approx(1 / 3)
    assert report.ttft_ms.p99 == inf


def test_a_request_that_fails_after_its_first_token_is_not_served_in_time() -> None:
    failed = record(5.0, 50, 0.1, 0.11)
    assert not failed.misses
    failed.error = "a launch raised"
    assert failed.misses
    assert Report.of(served(*FOUR[:2], failed), Slo(50.0)).ttft_kept == pytest.approx(2 / 3)
    assert not DriftCriterion(60.0).is_met(served(*FOUR[:2], failed))


@pytest.mark.parametrize(("last", "is_stable"), [(0.2, True), (0.45, True), (0.9, False)])
def test_waits_that_grow_are_seen(last: float, is_stable: bool) -> None:
    waits = [0.1] * 10 + [(0.1 + last) / 2] * 10 + [last] * 10
    records = [record(float(n), 10, wait, output=1) for n, wait in enumerate(waits)]
    assert Report.of(served(*records)).is_stable is is_stable
