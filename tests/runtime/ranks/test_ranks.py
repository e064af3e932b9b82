"""Several ranks behind one scheduler, as processes over gloo: tokens, and ranks that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from smkern.models import Decoder, SamplingParams, Weights
from tests.models.generation import make_llm
from tests.processes import on_processes
from tests.runtime.alone import Alone
from tests.runtime.ranks import case

pytestmark = pytest.mark.slow


def truth(count: int, size: int) -> list[list[int] | None]:
    """Tokens of each request alone, on one rank; None for those that are cancelled."""
    config = case.config(size)
    alone = Alone(Decoder(config, Weights.random(config, 3)), 80)
    return [
        None if spec.cancel_after is not None else alone.generate(spec.prompt, spec.params)
        for spec in case.specs(count)
    ]


@pytest.mark.parametrize(("size", "count", "seeds"), [(2, 7, (1, 2)), (4, 4, (4,))])
def test_tokens_are_those_of_one_rank(size: int, count: int, seeds: tuple[int, ...]) -> None:
    found = on_processes(size, case.serve, size, count, seeds, 20.0)
    assert [outcome.error for outcome in found] == [""] * size
    assert [outcome.result for outcome in found[1:]] == ["followed"] * (size - 1)
    want = truth(count, size)
    assert sum(tokens is not None for tokens in want) >= count // 2
    for tokens in found[0].result:
        for got, wanted in zip(tokens, want, strict=True):
            assert wanted is None or got == wanted


def test_an_llm_under_torchrun(tmp_path: Path) -> None:
    """Rank 0 generates what one process does; it need not close: the others end with it."""
    alone = make_llm(case.config(2)).generate(case.PROMPTS, case.PARAMS)
    want = [list(x.tokens) for x in alone]
    first, second = on_processes(2, case.generate, 2, "")
    assert (first.error, second.error) == ("", "")
    assert first.result[0] == [want, want]
    assert "it leads" in first.result[1]
    assert "rank 1: requests are rank 0's; call follow()" in second.result
    missing = str(tmp_path)
    for outcome in on_processes(2, case.generate, 2, missing):
        assert outcome.error.startswith("ConfigError"), outcome


def test_served_by_all_ranks() -> None:
    config = case.config(2)
    alone = Alone(Decoder(config, Weights.random(config, 3)), 80)
    params = SamplingParams(6, ignore_eos=True)
    first, second = on_processes(2, case.served_by_ranks, 2)
    assert (first.error, second.error) == ("", "")
    assert first.result[0] == [alone.generate([1, 2, 3 + i], params) for i in range(3)]
    assert second.result[0] is None
    assert "polcy" in first.result[2]
    assert second.result[2] == ""
    for outcome in (first, second):
        assert "max_running is 5 on rank 1 and 4 on rank 0" in outcome.result[1]


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_is_killed_is_named_on_all(who: int) -> None:
    found = on_processes(3, case.fail, 3, 10.0, who, "killed")
    for rank, outcome in enumerate(found):
        if rank == who:
            assert outcome.status == -9
            continue
        assert f"rank {who} is gone" in outcome.error, outcome


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_stopped_is_named_on_all(who: int) -> None:
    found = on_processes(3, case.fail, 3, 1.0, who, "stopped", left_behind=who)
    for rank, outcome in enumerate(found):
        if rank != who:
            assert f"rank {who} has" in outcome.error, outcome
            assert "stopped" in outcome.error


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_without_memory_is_named_on_all(who: int) -> None:
    found = on_processes(2, case.fail, 2, 2.0, who, "no memory")
    others = "others" if who == 0 else "rank 0"
    for outcome in found:
        named = f"rank {who} failed where {others} did not (OutOfMemoryError: planted"
        assert named in outcome.error, outcome


def test_what_raises_on_all_ranks_fails_its_requests_alone() -> None:
    found = on_processes(2, case.fail, 2, 10.0, None, "no memory")
    assert [outcome.error for outcome in found] == ["", ""]
    assert all("planted: no memory" in error for error in found[0].result)
    assert found[1].result == "followed to the end"
