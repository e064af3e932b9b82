"""The benchmarks on a GPU: times that can be true, and a small suite from end to end."""

from __future__ import annotations

import torch
from click.testing import CliRunner

from smkern.bench import gemm, host_cost
from smkern.bench.gemm_providers import cublas_call
from smkern.bench.results import load_results
from smkern.device import device_info
from smkern.measure.gemm import GemmOperands
from smkern.measure.timing import Case, run_eagerly, time_interleaved

QUICK = ["--shapes", "4096x4096", "--ms", "64,2048"]


def test_a_spin_takes_no_less_than_the_cycles_it_was_told():
    stream = torch.cuda.Stream()
    cycles = 400_000
    least_us = 0.98 * cycles / device_info().sm_clock_mhz
    short = Case(lambda i: torch.cuda._sleep(cycles), stream, calls=2)
    long = Case(lambda i: torch.cuda._sleep(2 * cycles), torch.cuda.Stream(), calls=1)
    timings = time_interleaved({"short": short, "long": long}, rounds=5)
    assert timings["short"].us_median > least_us
    assert timings["long"].us_median > 2 * least_us


def test_cublas_reads_weights_at_a_rate_that_hbm_has():
    ops = GemmOperands(28672, 4096, 8)
    call, stream = cublas_call(ops, 8), torch.cuda.Stream()
    run_eagerly(call, stream)
    timing = time_interleaved({"mm": Case(call, stream, 4)}, rounds=5)["mm"]
    tbps = 28672 * 4096 * 2 / timing.us_median / 1e6
    assert 0 < tbps < 4.9


def test_a_quick_suite_has_every_provider_and_resumes(tmp_path):
    out = tmp_path / "gemm.json"
    total = device_info().num_sms
    args = [*QUICK, "--budgets", f"32,{total - 32},{total}", "--out", str(out)]
    ran = CliRunner().invoke(gemm.command, args, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    results = load_results(out)
    ours = [c for c in results.cells if c["provider"].startswith("smkern")]
    assert len(ours) == 3 * 2 * 3
    assert [c.get("error") for c in ours] == [None] * len(ours)
    assert all(c["vs_cublas"] > 0 for c in ours)
    assert all(0 < c["fraction_of_ceiling"] < 1.1 for c in ours)
    again = CliRunner().invoke(gemm.command, [*args, "--resume"], catch_exceptions=False)
    assert "0 groups left" in again.output
    assert len(load_results(out).cells) == len(results.cells)


def test_host_costs_have_rows(tmp_path):
    out = tmp_path / "host.json"
    ran = CliRunner().invoke(
        host_cost.command, ["--quick", "--out", str(out)], catch_exceptions=False
    )
    assert ran.exit_code == 0, ran.output
    names = {cell["case"]["name"] for cell in load_results(out).cells}
    assert {"eager", "torch_ops", "switch"} <= names
