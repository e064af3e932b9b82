"""What is shared by all M: the launches of a layer are those of a process that saw no other M."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from smkern.ops.bounded_cache import model_rows
from tests.ops.fake_layer import FakeLayer, Launched, without_driver

pytestmark = pytest.mark.slow

BUDGETS = (16, 92)
PARTS = ("plan", "input_norm", "qkv", "append", "attention", "o", "post_norm", "gate_up", "down")


@pytest.fixture(scope="module")
def launched() -> Iterator[list[Launched]]:
    found: list[Launched] = []
    with without_driver(found):
        yield found


@pytest.fixture(scope="module", params=BUDGETS)
def seasoned(request: pytest.FixtureRequest, launched: list[Launched]) -> tuple[int, FakeLayer]:
    """A layer that has seen many lengths, in no order."""
    layer = FakeLayer(request.param)
    for m in random.Random(5).sample(range(1, 8193), 30):
        _launches(layer, m, launched)
    return request.param, layer


def _launches(layer: FakeLayer, m: int, launched: list[Launched]) -> list[Launched]:
    launched.clear()
    for call in layer.calls(m).values():
        call()
    return list(launched)


@pytest.mark.parametrize("m", [1, 100, 1321])
def test_launches_are_those_of_a_process_that_saw_no_other_length(m, seasoned, launched):
    num_sms, layer = seasoned
    mine = _launches(layer, m, launched)
    assert len(mine) >= len(PARTS)
    assert mine == _launches(FakeLayer(num_sms), m, launched)


def test_lengths_in_turns_have_launches_of_their_own(seasoned, launched):
    _, layer = seasoned
    short, long = (_launches(layer, m, launched) for m in (130, 4000))
    assert short != long
    for _ in range(2):
        assert _launches(layer, 130, launched) == short
        assert _launches(layer, 4000, launched) == long


@pytest.mark.parametrize("part", ["input_norm", "append", "qkv"])
def test_one_choice_for_a_step_of_rows(part, seasoned):
    """Nothing is chosen twice for a step: as few choices are kept as there are steps."""
    _, layer = seasoned
    steps = {model_rows(m) for m in random.Random(7).sample(range(1, 8193), 100)}
    kept = {
        "input_norm": layer.norm.dispatcher._choices,
        "append": layer.append.dispatcher._choices,
        "qkv": layer.gemm.dispatcher._steps,
    }[part]
    for m in sorted(steps):
        layer.calls(m)[part]()
    before = len(kept)
    others = [m - 1 for m in sorted(steps) if model_rows(m - 1) == m]
    assert others
    for m in others:
        layer.calls(m)[part]()
    assert len(kept) == before
