"""The host-cost suite with everything that needs a GPU replaced."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import smkern
from smkern.bench import host_cost
from smkern.bench.host_timing import host_time
from smkern.bench.results import load_results
from smkern.device import Budget
from smkern.measure.gemm import GemmOperands
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.profile import load_profile
from tests.bench.doubles import FakePartitions, resumed, run_suite

pytestmark = pytest.mark.slow


@pytest.fixture
def fake_gpu(cuda, monkeypatch):
    """CPU tensors of a few elements, one call a trial, a device of 32 SMs."""
    profile = load_profile("h200")
    info = SimpleNamespace(num_sms=20, sm_granularity=2)
    patches = {
        (host_cost, "dispatcher_of"): lambda: offline_dispatcher(profile, None),
        (host_cost, "Partitions"): lambda *budgets, **options: FakePartitions(cuda),
        (host_cost, "GemmOperands"): lambda n, k, m, num_sets: GemmOperands(
            8, 8, 128, device="cpu", num_sets=num_sets
        ),
        (host_cost, "current_budget"): lambda: Budget(20, "mask", True),
        (host_cost, "PROBES"): ((128, 2048, 1024), (16, 512, 8192)),
        (host_cost, "device_info"): lambda: info,
        (host_cost, "plain_launch"): lambda a, w, out, num_sms: None,
        (host_cost, "host_time"): lambda call, drain=True: host_time(call, calls=2, trials=1),
        (smkern, "warmup"): lambda **options: SimpleNamespace(seconds=1.0, variants=9),
        (smkern, "counters"): lambda: SimpleNamespace(compilations=3, module_loads=5),
        (torch.cuda, "current_stream"): lambda: None,
    }
    for (module, name), value in patches.items():
        monkeypatch.setattr(module, name, value, raising=False)
    return patches


def test_rows_have_values_units_and_targets(fake_gpu, tmp_path):
    out = tmp_path / "host.json"
    run_suite(host_cost.command, out, "--ms", "1,4")
    results = load_results(out)
    rows = {cell["case"]["name"]: cell for cell in results.cells}
    wanted = {"eager", "torch_ops", "new_budget", "compilations", "module_loads"}
    assert wanted <= set(rows)
    assert all({"value", "unit"} <= set(row) for row in rows.values())
    assert rows["compilations"]["value"] == 0
    assert rows["compilations"]["met"] is True
    assert rows["new_budget"]["target"] == 5.0
    assert results.summary["of"] > 4
    providers = {c["provider"] for c in results.cells if c["case"]["name"] == "eager"}
    assert providers == {"smkern", "triton", "cublas"}


def test_a_resumed_run_measures_the_parts_that_the_file_lacks(fake_gpu, tmp_path):
    out, options = tmp_path / "host.json", ("--ms", "1,4")
    run_suite(host_cost.command, out, *options)
    names = [cell["case"]["name"] for cell in load_results(out).cells]
    calls = names.index("warmup_seconds")
    assert resumed(host_cost.command, out, calls - 1, *options) == 0
    assert resumed(host_cost.command, out, len(names) - 1, *options) == calls
    assert resumed(host_cost.command, out, len(names), *options) == len(names)


def test_host_time_counts_calls_per_trial(cuda):
    seen = []
    found = host_time(seen.append, calls=5, trials=3)
    assert len(seen) == 5 * 4
    assert len(found.us_all) == 3
