"""How many tokens came late, read off launches that ended."""

from __future__ import annotations

import pytest

from smkern.latency import Chunk, Size
from smkern.policies import Ended
from smkern.policies.lateness import (
    BACK_OFF,
    GIVE_BACK,
    GIVEN,
    LEAST_AIM,
    MOST,
    MOST_AIM,
    OWN,
    Lateness,
)

LIMIT = 10_000.0


def lateness(allowed: float = 0.01) -> Lateness:
    return Lateness(LIMIT, allowed, dict.fromkeys(("mixed", "split", "turns"), 0.95))


def step(
    began: float, ended: float, rows: int, *, num_sms: int = 132, chunk: int = 0, seen: float = 0.0
) -> Ended:
    chunks = (Chunk(chunk),) if chunk else ()
    size = Size(chunks, 4, 4, bool(chunk), rows, 100 * rows)
    return Ended("decode", num_sms, size, began, ended, seen or ended)


def prompts(ended: float, count: int, *, head: bool = True) -> Ended:
    return Ended("prefill", 100, Size((Chunk(64),) * count, 4, 4, head), ended - 1, ended, ended)


def late_tokens(seen: Lateness, counted: int) -> float:
    return seen.share * (GIVEN + counted)


def test_a_gap_is_from_one_step_to_the_next() -> None:
    seen = lateness()
    seen.see([step(0, 9_000, 50)], 132)
    seen.see([step(9_000, 18_000, 50), step(18_000, 28_500, 50)], 132)
    assert seen.share == pytest.approx(50 / (GIVEN + 100))


def test_a_gap_is_as_the_host_handed_tokens_out() -> None:
    seen = lateness()
    seen.see([step(0, 9_000, 50), step(9_000, 18_000, 50, seen=20_000)], 132)
    assert late_tokens(seen, 50) == pytest.approx(50)
    seen.see([step(18_000, 29_000, 50)], 132)
    assert late_tokens(seen, 100) == pytest.approx(50), "9 ms behind what came late"


def test_who_joins_waits_from_the_end_of_the_step_that_ran() -> None:
    """Two come in the midst of a step, with which their first token is handed out."""
    seen = lateness()
    seen.see([step(0, 9_000, 50), prompts(12_000, 2)], 132)
    seen.see([step(9_000, 18_000, 50), step(18_000, 27_000, 52)], 132)
    assert seen.share == 0
    seen.see([prompts(30_000, 1), step(27_000, 36_000, 52), step(36_000, 46_500, 53)], 132)
    assert late_tokens(seen, 207) == pytest.approx(53)


def test_layers_without_a_head_bring_nobody() -> None:
    seen = lateness()
    seen.see([step(0, 9_000, 50), prompts(9_000, 2, head=False), step(9_000, 18_000, 50)], 132)
    assert seen.share == 0


def test_the_first_step_after_a_pause_is_late_for_nobody() -> None:
    seen = lateness()
    seen.see([step(0, 9_000, 1), prompts(900_000, 1), step(900_000, 909_000, 1)], 132)
    assert seen.share == 0


@pytest.mark.parametrize(
    ("num_sms", "chunk", "mode"), [(132, 64, "mixed"), (32, 0, "split"), (132, 0, "turns")]
)
def test_the_aim_of_what_was_late_falls(num_sms: int, chunk: int, mode: str) -> None:
    seen = lateness()
    seen.see([step(0, 9_000, 500), step(9_000, 20_000, 500, num_sms=num_sms, chunk=chunk)], 132)
    expected = dict.fromkeys(seen.aims, 0.95) | {mode: 0.95 - MOST * BACK_OFF}
    assert seen.aims == pytest.approx(expected)


def test_no_aim_falls_for_a_pause_of_the_host() -> None:
    """Its tokens are late all the same, but are no reason to take other ways."""
    seen = lateness()
    steps = [step(0, 9_000, 50), step(9_000, 18_000, 5_000, seen=40_000)]
    seen.see([*steps, step(18_000, 27_000, 50, seen=40_000)], 132)
    assert seen.aims == dict.fromkeys(seen.aims, 0.95)
    assert late_tokens(seen, 5_050) == pytest.approx(5_000)
    assert not seen.is_overdrawn
    seen.see([step(40_000, 51_000, 5_000)], 132)
    assert seen.aims["turns"] < 0.95, "a longer step"
    assert seen.is_overdrawn


@pytest.mark.parametrize("late", [500, 999])
def test_what_launching_takes_is_no_pause(late: float) -> None:
    seen = lateness()
    seen.see([step(0, 9_000, 50), step(9_000, 18_600, 500, seen=18_600 + late)], 132)
    assert seen.aims["turns"] < 0.95


def test_the_aim_falls_by_less_while_little_is_late() -> None:
    seen = lateness(allowed=0.01)
    seen.see([step(0, 9_000, 2), step(9_000, 20_000, 2)], 132)
    fell = 0.95 - seen.aims["turns"]
    assert fell == pytest.approx(BACK_OFF * 2 * seen.share / 0.01)
    assert 0 < fell < 0.3 * BACK_OFF


def test_the_aim_rises_only_by_steps_near_what_is_planned_and_stays_in_bounds() -> None:
    seen = lateness()
    seen.see([step(5_000 * i, 5_000 * (i + 1), 5) for i in range(1000)], 132)
    assert seen.aims["turns"] == 0.95
    seen.see([step(9_000 * i, 9_000 * (i + 1), 5) for i in range(600, 20_000)], 132)
    assert seen.aims["turns"] == MOST_AIM
    seen.see([step(11_000 * i, 11_000 * (i + 1), 5) for i in range(17_000, 17_100)], 132)
    assert seen.aims["turns"] == LEAST_AIM


def test_an_aim_that_fell_to_the_bottom_rises_by_steps_as_short_as_it_plans() -> None:
    seen = lateness()
    seen.aims["mixed"] = LEAST_AIM
    seen.see([step(7_000 * i, 7_000 * (i + 1), 5, chunk=64) for i in range(100)], 132)
    assert seen.aims["mixed"] == pytest.approx(LEAST_AIM + 99 * GIVE_BACK["mixed"])


def test_a_few_of_its_own_tokens_may_always_be_late() -> None:
    seen = lateness(allowed=0.01)
    seen.see([step(0, 9_000, 500), step(9_000, 60_000, 500)], 132)
    assert seen.allows(1, 1 / (OWN * 0.01))
    assert not seen.allows(1, 0.9 / (OWN * 0.01))


def test_what_may_be_late_is_a_share_of_all() -> None:
    seen = lateness(allowed=0.01)
    assert seen.allows(GIVEN * 0.01, 0)
    assert not seen.allows(GIVEN * 0.01 + 1, 0)
    assert seen.allows(GIVEN * 0.01 + 1, 100)
    seen.see([step(0, 9_000, 500), step(9_000, 20_000, 500)], 132)
    assert not seen.allows(1, 0)
    assert seen.allows(0, 0)


def test_old_lateness_fades() -> None:
    seen = lateness()
    seen.see([step(11_000 * i, 11_000 * (i + 1), 100) for i in range(20)], 132)
    before = seen.share
    seen.see([step(9_000 * i, 9_000 * (i + 1), 100) for i in range(25, 1025)], 132)
    assert seen.share < 0.05 * before
