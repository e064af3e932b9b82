"""Tables of how far latency models are off."""

from __future__ import annotations

from typing import Any

from smkern.bench.tables.latency import Gpu, models_table, ours_table
from smkern.bench.tables.markdown import NOT_MEASURED


def cells(model: str, provider: str, mean: float) -> list[dict[str, Any]]:
    """A latency model whose worst errors are twice the mean ones."""
    kinds = {
        kind: {"launches": 9, "mean": mean + more, "worst": 2 * (mean + more)}
        for kind, more in (("all", 0.0), ("decode", 0.01), ("prefill", 0.02))
    }
    found: list[dict[str, Any]] = [
        {"case": {"model": model, "name": name}, "provider": provider, "by_kind": kinds}
        for name in ("solo_mape", "beside_mape")
    ]
    guard = {"guard_coverage": 0.9625, "guard_over": 0.104} if provider == "smkern" else {}
    found += [
        {"case": {"model": model, "name": name}, "provider": provider, "value": value}
        for name, value in guard.items()
    ]
    return found


GPUS = [
    Gpu("H200", [*cells("qwen3-32b", "bullet", 0.1), *cells("qwen3-32b", "smkern", 0.03)]),
    Gpu("H100", [*cells("qwen3-8b", "smkern", 0.05)]),
]


def test_ours_is_first_of_all_models_and_what_was_not_measured_is_empty() -> None:
    _, _, *rows = models_table(GPUS).splitlines()
    assert rows == [
        "| `table` (ours) |  | 3.0 / 6.0 | 5.0 / 10.0 |  | 4.0 / 8.0 | 6.0 / 12.0 |"
        "  | 5.0 / 10.0 | 7.0 / 14.0 |",
        "| `bullet` |  | 10.0 / 20.0 |  |  | 11.0 / 22.0 |  |  | 12.0 / 24.0 |  |",
    ]
    assert models_table([]) == NOT_MEASURED


def test_ours_by_model_and_gpu_the_smallest_first() -> None:
    more = Gpu("H200", [*GPUS[0].cells, *cells("qwen3-30b-a3b", "smkern", 0.02)])
    _, _, *rows = ours_table([more, GPUS[1]]).splitlines()
    assert rows == [
        "| 30B-A3B, H200 | 2.0 / 4.0 | 3.0 / 6.0 | 4.0 / 8.0 | 96.2% | 10.4% |",
        "| 32B, H200 | 3.0 / 6.0 | 4.0 / 8.0 | 5.0 / 10.0 | 96.2% | 10.4% |",
        "| 8B, H100 | 5.0 / 10.0 | 6.0 / 12.0 | 7.0 / 14.0 | 96.2% | 10.4% |",
    ]
