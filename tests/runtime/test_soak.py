"""A soak in miniature on a clock of its own: segments, what raised, leaks by name, its rows."""

from __future__ import annotations

from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from smkern.bench.results import load_results
from smkern.bench.runtime.workload import Sizes
from smkern.models import Weights
from tests.models.generation import tiny
from tests.runtime.equality import Equality, Verdict
from tests.runtime.results import record, soak_cells, token_cell
from tests.runtime.soak import Footprint, Segment, Soak, run_segment

pytestmark = pytest.mark.slow

SIZES = Sizes(
    (16, 48), max_running=6, max_prefill=3, max_tokens=48, max_context=96, num_pages=20, reuse=True
)
TICK_S, SECONDS = 0.1, 8.0
"""The clock goes on by a tick whenever it is read: a busy machine changes nothing."""


@cache
def weights() -> Weights:
    return Weights.random(tiny(), 3)


def segment(path: Path, **options: Any) -> Soak:
    given = {"say": lambda line: None, "longest": 40, "clock": partial(next, count(0.0, TICK_S))}
    return run_segment(weights(), SIZES, path, "tiny", SECONDS, **given | options)


def test_a_soak_is_carried_on(tmp_path: Path) -> None:
    """Counters and the requests to come are carried from one segment to the next."""
    path = tmp_path / "runtime.soak"
    first, state = segment(path), segment(path)
    assert len(state.segments) == 2
    assert state.segments[0] == first.segments[0]
    assert not state.leaks, state.leaks
    assert state == Soak.load(path, "tiny")
    assert (state.minutes, state.next_seed) == (0, 2)
    assert state.unjudged_minutes >= 2 * SECONDS / 60
    assert all(x.tokens and x.switches and x.footprints for x in state.segments)
    assert sum(x.requests for x in state.segments) > 4 * SIZES.max_running
    with pytest.raises(ValueError, match="is a soak of tiny"):
        Soak.load(path, "another")


def test_a_soak_remembers_what_raised(tmp_path: Path) -> None:
    path = tmp_path / "runtime.soak"

    def hot(line: str) -> None:
        raise RuntimeError("hot")

    with pytest.raises(RuntimeError, match="hot"):
        segment(path, say=hot)
    assert Soak.load(path, "tiny").leaks == ["segment 0: RuntimeError: hot"]
    assert segment(path).leaks == ["segment 0: RuntimeError: hot"]


def at(
    second: float, host: int = 1000, graphs: int = 4, held: int = 3, dropped: int | None = None
) -> Footprint:
    return Footprint(second, host, 0, graphs, held, 5, dropped)


SHORT = Segment(seconds=120.0, footprints=[at(5), at(95), at(120)])
LONG = Segment(seconds=180.0, footprints=[at(5), at(95), at(175)])


def test_minutes_too_short_to_tell_a_leak_do_not_count() -> None:
    """Else an hour of short segments would pass with any leak."""
    assert not Segment(seconds=60.0).is_judged
    assert (SHORT.is_judged, LONG.is_judged) == (False, True)
    state = Soak("tiny", segments=[SHORT, LONG, SHORT])
    assert (state.minutes, state.unjudged_minutes) == (3.0, 4.0)


def test_leaks_are_named() -> None:
    def leaks(*footprints: Footprint, held: int = 0, **more: Any) -> list[str]:
        last = at(60.0, held=held)
        return Segment(footprints=list(footprints), left=last, **more).find_leaks()

    assert leaks(at(1, 10), at(95), at(150, 1009)) == []
    assert leaks(at(1, 10), at(30, 1000)) == [], "what fills up to its bound"
    assert leaks(at(95, 10, dropped=0), at(150), at(210, 1009)) == [], "a slow timeline fills up"
    assert leaks(at(95), at(150, 1011)) == ["host_bytes grew from 1000 to 1011 in 150 s"]
    assert leaks(at(95), at(150, graphs=5)) == ["graphs grew from 4 to 5 in 150 s"]
    assert leaks(held=2) == ["2 pages are held by nobody"]
    assert leaks(longest_quiet_s=7.0) == ["no token for 7.0 s"]
    assert leaks(failed=["x"]) == ["failed: x"]


def test_rows_of_the_suite_s_file(tmp_path: Path) -> None:
    path = tmp_path / "runtime.json"
    exact = Verdict(tokens=9, mismatches=1, failed=["x"], wrong=[(3, 0)], preemptions=2, switches=5)
    record([token_cell(Equality(24, layers=2), exact)], str(path))
    fast = token_cell(Equality(12, is_fast=True), Verdict(tokens=9, clear=7))
    record([fast, *soak_cells(Soak("tiny", segments=[SHORT, LONG]), 2)], str(path))
    results = load_results(path)
    assert [(cell["case"], cell["value"]) for cell in results.cells] == [
        ({"model": "qwen3-8b", "name": "token_mismatches", "requests": 24, "layers": 2}, 2),
        ({"model": "qwen3-8b", "name": "token_mismatches", "requests": 12, "mode": "fast"}, 0),
        ({"model": "qwen3-8b", "name": "soak_minutes"}, 3.0),
        ({"model": "qwen3-8b", "name": "soak_leaks"}, 0),
    ]
    assert results.cells[0]["wrong"] == [[3, 0]]
    assert results.cells[1]["clear"] == 7
    assert results.summary["qwen3-8b"]["soak_leaks"]["met"]
    (_, leaks) = soak_cells(Soak("tiny", segments=[SHORT]), 2)
    assert (leaks["value"], leaks["unjudged_minutes"]) == (None, 2.0), "too short to tell"
