"""Orders of SMs, rows of the summary and the picture, from made-up devices and cells."""

from __future__ import annotations

import click
import pytest

from smkern.bench.contexts import RANDOM_DRAWS, candidate_orders
from smkern.bench.partition_rows import TARGET_TBPS, best_choice, summarize
from smkern.bench.partitions import _check_rungs, default_rungs
from smkern.bench.plots import draw
from smkern.bench.results import Results, load_results

GPCS = 4


def read(provider: str, num_sms: int, tbps: float) -> dict:
    return {
        "op": "read",
        "case": {"bytes": 1 << 30, "asked_sms": num_sms},
        "num_sms": num_sms,
        "mode": "green",
        "provider": provider,
        "us": (1 << 30) / tbps / 1e6,
        "tflops": None,
        "tbps": tbps,
        "fraction_of_ceiling": None,
    }


def cost(name: str, value: float, **more) -> dict:
    case = {"name": name, **more.pop("case", {})}
    return {"op": "partition_cost", "case": case, "provider": "smkern", "value": value, **more}


def filled() -> Results:
    results = Results(meta={"gpu": "NVIDIA H200"})
    for n, target in TARGET_TBPS.items():
        for provider, share in (
            ("smkern", 1.0),
            ("driver", 0.75),
            ("torch", 0.74),
            ("flashinfer-way", 0.76),
            ("order:id-order", 1.01),
            ("order:random-0", 0.9),
        ):
            results.add(read(provider, n, round(target * share, 4)))
    return results


def test_default_rungs_are_eighths_and_some_between():
    rungs = default_rungs(132)
    assert rungs[:6] == (8, 12, 16, 20, 24, 28)
    assert (rungs[-1], len(rungs)) == (128, 16 + 3)
    assert default_rungs(20) == (8, 12, 16)


@pytest.mark.parametrize("rungs", [(7,), (0,), (132,), (16, 140)])
def test_a_rung_that_cannot_be_is_named(rungs):
    with pytest.raises(click.BadParameter, match="132 SMs; give even counts from 2 to 130"):
        _check_rungs(rungs, 132)


@pytest.fixture
def device() -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """16 pairs on 4 GPCs, ids running over the GPCs in turn, listed by GPC; groups of 4 pairs."""
    pairs = [
        (2 * (row * GPCS + g), 2 * (row * GPCS + g) + 1) for g in range(GPCS) for row in range(4)
    ]
    eights = [tuple(sm for pair in pairs[4 * g : 4 * g + 4] for sm in pair) for g in range(GPCS)]
    return pairs, eights


def test_every_order_takes_every_pair_once(device):
    pairs, eights = device
    orders = candidate_orders(pairs, eights)
    assert len(orders) == 5 + RANDOM_DRAWS
    assert all(sorted(order) == list(range(16)) for order in orders.values())
    assert orders == candidate_orders(pairs, eights)


def test_id_order_spreads_and_blocked_fills(device):
    pairs, eights = device
    orders = candidate_orders(pairs, eights)

    def gpcs_of_first_four(name: str) -> set[int]:
        return {pairs[i][0] // 2 % GPCS for i in orders[name][:4]}

    assert gpcs_of_first_four("id-order") == {0, 1, 2, 3}
    assert gpcs_of_first_four("gpc-blocked") == {0}
    assert orders["id-order-reversed"] == orders["id-order"][::-1]


def test_a_pair_outside_the_drivers_groups_comes_last(device):
    pairs, eights = device
    assert candidate_orders(pairs, eights[1:])["gpc-blocked"][-4:] == [0, 1, 2, 3]


def test_summary_has_a_row_a_target_and_the_best_choice():
    rows = summarize(filled().cells)
    assert all(rows[f"bandwidth_tbps_{n}_sms"]["met"] for n in TARGET_TBPS)
    best = rows["of_best_choice"]
    assert best["value"] == pytest.approx(1 / 1.01, rel=1e-3)
    assert (best["met"], best["rungs"], best["best_there"]) == (True, 5, "order:id-order")
    assert rows["over_driver"]["16"] == pytest.approx(1.333, abs=1e-3)
    assert set(rows["over_torch"]) == {"8", "16", "24", "32", "48"}


def test_a_choice_that_beats_ours_by_more_is_missed():
    results = filled()
    results.add(read("order:random-1", 32, 5.0))
    best = summarize(results.cells)["of_best_choice"]
    assert (best["met"], best["worst_at"], best["best_there"]) == (False, 32, "order:random-1")
    assert best_choice(results.cells)[32] == (5.0, "order:random-1")


def test_costs_report_the_worst_and_wrong_answers():
    cells = [
        cost("ladder_memory", 180.0, unit="MiB", target=200.0, met=True, case={"atom": 2}),
        cost("ladder_memory", 210.0, unit="MiB", target=200.0, met=False, case={"atom": 8}),
        cost(
            "current_num_sms", 1.4, unit="us", case={"stream": "foreign"}, answer=132, right=False
        ),
    ]
    rows = summarize(cells)
    assert rows["ladder_memory_mib"] == {"value": 210.0, "target": 200.0, "met": False}
    assert rows["current_num_sms_foreign_us"] == {"value": 1.4, "answer": 132, "met": False}


def test_a_picture_from_a_file(tmp_path):
    filled().save(tmp_path / "partitions.json")
    results = load_results(tmp_path / "partitions.json")
    (picture,) = draw("partitions", results, tmp_path / "out")
    assert picture.name == "partitions.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    (again,) = draw("partitions", results, tmp_path / "again")
    assert again.read_bytes() == picture.read_bytes()
