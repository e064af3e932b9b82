"""The greedy oracle: it chooses what a second of each way shows to be best, and leaves nothing."""

from __future__ import annotations

import os

import pytest

from smkern.bench.replay.cases import Case
from smkern.bench.replay.measure import How, maker, rate_cell, simulated
from smkern.bench.replay.oracle import ORACLE, Oracle, OracleServer
from smkern.bench.replay.rows import of_oracle
from smkern.policies import Chunked, Policy, PrefillFirst, StaticSplit
from smkern.replay import Slo, Trace, replay
from smkern.replay.trace import Arrival

pytestmark = pytest.mark.slow

LIMIT_MS = 15.0


def saturated() -> Trace:
    """Prompts that never end, beside decode of many tokens."""
    return Trace("saturated", tuple(Arrival(0.02 * n, 2000, 200) for n in range(75)))


@pytest.fixture(scope="module")
def server() -> OracleServer:
    return OracleServer("qwen3-8b")


def oracle(server: OracleServer, *policies: Policy) -> Oracle:
    made = Oracle(policies, tbt_slo_ms=LIMIT_MS)
    replay(saturated(), server, made, drain=False)
    return made


@pytest.mark.parametrize("place", [0, 1])
def test_the_way_in_time_is_chosen_wherever_it_stands(server: OracleServer, place: int) -> None:
    policies: list[Policy] = [PrefillFirst(order="fcfs")]
    policies.insert(place, Chunked(predictor=server.predictor, tbt_slo_ms=LIMIT_MS, margin=0.08))
    chosen = oracle(server, *policies).chosen
    assert len(chosen) > 2
    assert set(chosen[1:]) == {place}


def test_of_ways_in_time_the_one_that_computes_most_is_chosen(server: OracleServer) -> None:
    few, most = StaticSplit(96), StaticSplit(56)
    assert oracle(server, few, most).chosen[-1] == 1


def test_no_trial_is_left_running(server: OracleServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fork, children = os.fork, []

    def noted() -> int:
        children.append(fork())
        return children[-1]

    monkeypatch.setattr(os, "fork", noted)
    made = oracle(server, StaticSplit(56), StaticSplit(64))
    assert len(children) == 2 * len(made.chosen)
    for pid in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_it_is_a_provider_of_the_table() -> None:
    case = Case("qwen3-8b", "writing-like", LIMIT_MS, "slack", ORACLE)
    server = simulated("qwen3-8b", (40, 56), policy=ORACLE)
    made = maker(case, ORACLE, server)()
    assert isinstance(made, Oracle)
    cell, served = rate_cell(case, How(rungs=(40, 56)), 6.0, seed=1, requests=12)
    assert cell["provider"] == ORACLE
    assert Slo(1e5).is_met(served)


def test_a_part_of_its_gain() -> None:
    def cell(provider: str, rate: float) -> dict[str, object]:
        case = Case("qwen3-8b", "writing-like", LIMIT_MS, "slack", provider)
        return case.cell() | {"goodput_rps": rate}

    found = of_oracle([cell("chunked", 8.0), cell("adaptive", 11.0), cell(ORACLE, 12.0)])
    assert [x["ratio"] for x in found] == [0.75]
    assert of_oracle([cell("chunked", 8.0), cell(ORACLE, 12.0)]) == []
    noise = [cell("chunked", 8.0), cell("adaptive", 8.4), cell(ORACLE, 8.1)]
    assert of_oracle(noise) == [], "who gains more than next to nothing has gained a draw"
