"""Curves and the order of work of the ceilings suite; the device is made up."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from smkern.bench import ceilings
from smkern.bench.ceiling_rows import curve, dense_beside, dense_ceiling, profile_of, summarize
from smkern.bench.ceilings import SHARES, Ceilings, command, counts, ship_profile, sides
from smkern.bench.contention import Beside, Load
from smkern.bench.dense import Dense
from smkern.bench.results import load_results
from smkern.device import Budget
from smkern.measure.partitions import Place
from smkern.measure.timing import Timing
from smkern.profile import load_profile, save_profile
from tests.bench.doubles import Meter, resumed, run_suite

TOTAL = 132
H200 = load_profile("h200").info
SIZE = 1 << 30


def cell(op: str, num_sms: int, rate: float, placement=None, beside=None, provider="x") -> dict:
    return {
        "op": op,
        "case": {"beside": beside},
        "num_sms": num_sms,
        "mode": "full" if placement is None else "green",
        "placement": placement,
        "provider": provider,
        "tbps": rate if op == "read" else None,
        "tflops": rate if op == "dense" else None,
        "sm_mhz": None,
    }


def test_each_share_comes_with_its_complement():
    found = counts(TOTAL, SHARES)
    assert found[0] == 8
    assert found[-1] == 124
    assert {TOTAL - n for n in found} == set(found)
    assert counts(TOTAL, [66, 132, 200]) == [66]


def test_a_curve_is_the_best_rate_of_its_placement():
    cells = [
        cell("read", 16, 3.2, "spread"),
        cell("read", 16, 2.5, "default"),
        cell("read", 16, 2.3, "spread", beside="dense"),
        cell("read", 132, 4.5),
        cell("dense", 116, 560.0, "spread", provider="cublas"),
        cell("dense", 116, 570.0, "spread", provider="smkern"),
    ]
    assert curve(cells, "read", "spread", beside=False) == {16: 3.2, 132: 4.5}
    assert curve(cells, "read", "default", beside=False) == {16: 2.5, 132: 4.5}
    assert curve(cells, "read", "spread", beside=True) == {16: 2.3}
    assert curve(cells, "dense", None, beside=False) == {116: 570.0}
    summary = summarize(cells)
    assert summary["read_tbps_spread_alone"] == {"16": 3.2, "132": 4.5}
    assert summary["dense_tflops_default_beside"] == {}


def test_the_dense_ceiling_follows_the_clock_under_load():
    cells = [
        cell("dense", 16, 113.0, "default") | {"sm_mhz": 1980.0},
        cell("dense", 132, 780.0) | {"sm_mhz": 1400.0},
        cell("dense", 132, 790.0, provider="y") | {"sm_mhz": 1500.0},
        cell("dense", 100, 640.0, "spread") | {"sm_mhz": None},
    ]
    found = dense_ceiling(cells, H200)
    assert found == {16: 129.8, 100: 790.0, 132: pytest.approx(4096 * 132 * 1500 / 1e6, abs=0.1)}


def test_a_measured_rate_is_never_above_the_ceiling():
    assert dense_ceiling([cell("dense", 132, 900.0) | {"sm_mhz": 1500.0}], H200) == {132: 900.0}


def test_beside_a_reader_the_ceiling_falls_as_the_product_did():
    cells = [
        cell("dense", 100, 600.0, "spread"),
        cell("dense", 100, 480.0, "spread", beside="read"),
        cell("dense", 100, 500.0, "default", beside="read"),
    ]
    assert dense_beside(cells, {100: 700.0}) == {100: 560.0}


def test_a_profile_answers_from_the_cells_and_survives_the_disk(tmp_path):
    cells = [
        cell("read", 16, 3.2, "spread"),
        cell("read", 16, 2.5, "default"),
        cell("read", 16, 2.3, "spread", beside="dense"),
        cell("read", 132, 4.5),
        cell("dense", 132, 790.0) | {"sm_mhz": 1500.0},
        cell("dense", 16, 113.0, "default") | {"sm_mhz": 1980.0},
    ]
    made = profile_of(cells, load_profile("h200").info, {"gpu": "NVIDIA H200", "torch": None})
    assert made.bandwidth(16) == 3.2
    assert made.bandwidth(16, placement="default") == 2.5
    assert made.bandwidth(16, beside=True) == 2.3
    assert made.flops(16) == pytest.approx(129.8, rel=1e-3)
    assert made.flops(132) == pytest.approx(811.0, rel=1e-3)
    assert made.provenance == {"gpu": "NVIDIA H200"}
    path = ship_profile(made, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["h200.json"]
    assert save_profile(made, tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize("flags", [["--ship", "--quick"], ["--save", "--budgets", "16"]])
def test_a_part_of_the_suite_is_no_profile(flags):
    ran = CliRunner().invoke(command, flags)
    assert ran.exit_code == 2
    assert "whole suite" in ran.output


class FakePartitions:
    full = Place(Budget(TOTAL), SimpleNamespace(cuda_stream=0))

    def __init__(self, *budgets, **options) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def at(self, num_sms: int, placement: str = "spread") -> Place | None:
        if placement == "default" and num_sms % 8 and (TOTAL - num_sms) % 8:
            return None
        return Place(Budget(num_sms), SimpleNamespace(cuda_stream=1), placement)


@pytest.fixture
def made(monkeypatch) -> Ceilings:
    """Reads take 400 us, products 2,000; beside each other 500 and 2,500. cuBLAS needs 64 SMs."""

    us = {"read": 400.0, "read_l2": 100.0, "dense": 2000.0}

    def together(loads, at_least_us, while_busy):
        while_busy()
        return {name: Timing((us[name],) * 3) for name in loads}

    def beside(probes, neighbour, clock, while_busy):
        while_busy()
        slower = {name: Timing((us[name] * 1.25,) * 3) for name in probes}
        return Beside(slower, Timing((2500.0,) * 3), clock.mhz())

    def working(place, errors):
        if place.num_sms < 64:
            errors["cublas"] = "no clusters"
        else:
            yield "cublas", lambda i: None
        yield "smkern", lambda i: None

    monkeypatch.setattr(ceilings, "time_together", together)
    monkeypatch.setattr(ceilings, "time_beside", beside)
    monkeypatch.setattr(Load, "of", lambda call, stream: Load(call, stream, 100.0))
    reader = SimpleNamespace(
        launch=lambda num_sms, raw: None,
        launch_l2=lambda num_sms, raw: None,
        num_bytes=SIZE,
        l2_bytes=lambda num_sms: SIZE // 2,
        shape=SimpleNamespace(name="2x1024x8"),
    )
    dense = SimpleNamespace(working=working, case={"m": 4096}, tflops=Dense.tflops)
    meter = Meter((1500.0, 690.0))
    clock = SimpleNamespace(mhz=lambda: 1467.0)
    return Ceilings(reader, dense, meter, {}, lambda stream: clock)


def test_alone_and_beside_give_a_cell_each(made):
    partitions = FakePartitions()
    cells = [
        *made.alone(partitions.at(16), dense=True),
        *made.beside(partitions.at(16), partitions.at(116)),
    ]
    assert [(c["op"], c["num_sms"], c["case"]["beside"], c["provider"]) for c in cells] == [
        ("read", 16, None, "reader:2x1024x8"),
        ("read_l2", 16, None, "reader:2x1024x8"),
        ("dense", 16, None, "smkern"),
        ("read", 16, "dense", "reader:2x1024x8"),
        ("read_l2", 16, "dense", "reader:2x1024x8"),
        ("dense", 116, "read", "smkern"),
    ]
    assert cells[0]["tbps"] == pytest.approx(SIZE / 400 / 1e6, rel=1e-3)
    assert cells[4]["tbps"] == pytest.approx(SIZE / 2 / 125 / 1e6, rel=1e-3)
    assert cells[5]["tflops"] == pytest.approx(Dense.tflops(2500.0), rel=1e-3)
    assert {c["sm_mhz"] for c in cells if c["case"]["beside"]} == {1467.0}
    assert summarize(cells)["sm_mhz_spread_beside"] == {"16": 1467.0}
    assert (cells[0]["sm_mhz"], cells[0]["watts"]) == (1500.0, 690.0)
    assert made.errors == {"cublas on 16 SMs (spread)": "no clusters"}


def test_a_resumed_run_measures_what_the_file_lacks(made, tmp_path, monkeypatch):
    for name, value in {
        "device_info": lambda: H200,
        "Partitions": FakePartitions,
        "best_reader": lambda places, among: made.reader,
        "Dense": lambda: made.dense,
        "power_meter": lambda: made.meter,
        "Ceilings": partial(Ceilings, clock_on=made.clock_on),
    }.items():
        monkeypatch.setattr(ceilings, name, value)
    out, options = tmp_path / "ceilings.json", ("--budgets", "4,16")
    run_suite(command, out, *options)
    found = load_results(out)
    places = [(c["num_sms"], c["case"]["beside"]) for c in found.cells]
    assert places[:4] == [(TOTAL, None)] * 4
    assert found.summary["failed"]["cublas on 16 SMs (spread)"] == "no clusters"
    assert resumed(command, out, 4, *options) == 4
    assert resumed(command, out, 5, *options) == 5
    assert resumed(command, out, len(places), *options) == len(places)


def test_every_count_meets_its_complement_in_both_placements():
    pairs = list(sides(FakePartitions(), TOTAL, SHARES))
    assert all(a.num_sms + b.num_sms == TOTAL for a, b in pairs)
    assert all(a.placement == b.placement for a, b in pairs)
    assert len(pairs) == 2 * 2 * len(SHARES)


def test_the_product_fills_its_waves():
    tiles = (4096 // 128) * (24576 // 256)
    assert tiles == 3072
    for num_sms in (8, 16, 60, 100, 116, TOTAL):
        waves = -(-tiles // num_sms)
        assert tiles / (waves * num_sms) > 0.94
