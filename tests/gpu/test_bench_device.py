"""The ceilings and partitions suites on a GPU: quick runs, and rates that the device can have."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

import smkern
from smkern.bench import ceilings, partitions
from smkern.bench.contexts import Driver
from smkern.bench.reader import SHAPES, Reader
from smkern.bench.reads import Green, time_reads
from smkern.bench.results import load_results
from smkern.device import device_info


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(0)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_each_reader_reads_the_whole_device_at_a_rate_that_memory_has(reader, shape):
    whole = Green(device_info().num_sms, torch.cuda.Stream())
    timing = time_reads(Reader(0, shape, reader.data), {"whole": whole}, rounds=3)["whole"]
    assert 1.0 < reader.tbps(timing.us_median) < 8.2


def test_the_drivers_own_group_is_what_it_says():
    driver = Driver()
    green = driver.one_group(16)
    try:
        assert green.num_sms == 16
        assert len(driver.sms_of(green)) == green.num_sms
    finally:
        torch.cuda.synchronize()
        green.close()


def test_more_spread_sms_read_more(reader):
    with smkern.ladder([8, 16, 32]) as ladder:
        parts = {n: ladder.split(decode=n).decode for n in (8, 16, 32)}
        places = {str(n): Green(part.num_sms, part.stream) for n, part in parts.items()}
        found = time_reads(reader, places, rounds=3)
    rates = [reader.tbps(found[str(n)].us_median) for n in (8, 16, 32)]
    assert rates[0] < rates[1] < rates[2]


def test_quick_ceilings(tmp_path):
    out = tmp_path / "ceilings.json"
    args = ["--quick", "--out", str(out)]
    ran = CliRunner().invoke(ceilings.command, args, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    cells = load_results(out).cells
    assert {(c["op"], c["case"]["beside"]) for c in cells} == {
        ("read", None),
        ("read", "dense"),
        ("read_l2", None),
        ("read_l2", "dense"),
        ("dense", None),
        ("dense", "read"),
    }


def test_quick_partitions(tmp_path):
    out = tmp_path / "partitions.json"
    args = ["--quick", "--out", str(out)]
    ran = CliRunner().invoke(partitions.command, args, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    results = load_results(out)
    providers = {c["provider"] for c in results.cells if c["op"] == "read"}
    assert {"smkern", "driver", "flashinfer-way", "order:id-order", "order:random-0"} <= providers
    assert results.summary["of_best_choice"]["rungs"] == 3
    assert all(c["right"] for c in results.cells if c["case"].get("name") == "current_num_sms")
