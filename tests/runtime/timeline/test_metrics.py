"""Prometheus' text of the stats, as its own parser reads it."""

from __future__ import annotations

import builtins

import pytest

from smkern.errors import ArgumentError
from smkern.policies import Decision
from smkern.runtime.timeline.metrics import StatsCollector, metrics_text
from smkern.runtime.timeline.stats import Stats, StatsMeter
from tests.runtime.timeline.timelines import Script, waiting


def samples(text: str) -> dict[tuple[str, tuple], float]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def served() -> Stats:
    script = Script()
    meter = StatsMeter(script.timeline)
    meter.arrived(1, 0.0, prompt_tokens=30)
    script.decided(0.0, Decision(), running_kv=(30,), waiting=waiting(2))
    script.ran("decode", 0, 200)
    script.ran("decode", 300, 400, launched_us=290)
    meter.delivered([1], 200.0)
    meter.delivered([1], 400.0)
    return meter.stats(400.0, preemptions=2)


def test_the_text_holds_the_stats():
    pytest.importorskip("prometheus_client")
    found = samples(metrics_text(served))
    assert found["smkern_requests_total", ()] == 1
    assert found["smkern_tokens_total", ()] == 2
    assert found["smkern_preemptions_total", ()] == 2
    assert found["smkern_requests_waiting", ()] == 2
    assert found["smkern_tbt_seconds", (("quantile", "0.99"),)] == pytest.approx(200e-6)
    assert found["smkern_tbt_seconds_sum", ()] == pytest.approx(200e-6)
    assert found["smkern_ttft_seconds_count", ()] == 1
    assert found["smkern_busy_seconds_total", (("lane", "decode"),)] == pytest.approx(300e-6)
    assert found["smkern_bubble_seconds_total", (("lane", "decode"),)] == pytest.approx(100e-6)
    assert found["smkern_bubble_ratio", ()] == pytest.approx(0.25)


def test_nothing_served_has_no_quantiles():
    pytest.importorskip("prometheus_client")
    found = samples(metrics_text(Stats))
    assert ("smkern_ttft_seconds", (("quantile", "0.5"),)) not in found
    assert found["smkern_tokens_total", ()] == 0


def test_no_registry_is_shared():
    prometheus = pytest.importorskip("prometheus_client")
    before = prometheus.generate_latest()
    metrics_text(Stats)
    registry = prometheus.CollectorRegistry()
    registry.register(StatsCollector(Stats))
    assert b"smkern_tokens_total" in prometheus.generate_latest(registry)
    assert b"smkern" not in before + prometheus.generate_latest()


def test_without_prometheus_client_the_error_says_what_to_do(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest, **more):
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(ArgumentError, match="pip install prometheus-client"):
        metrics_text(Stats)
