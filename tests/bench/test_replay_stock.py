"""Chunked prefill on stock kernels' times, beside the policies."""

from __future__ import annotations

from pathlib import Path

import pytest

from smkern.bench.replay.cases import Case, checked_policies
from smkern.bench.replay.measure import simulated, specs
from smkern.bench.replay.stock import ON_STOCK, stock_predictor, stock_timings
from smkern.errors import TableError
from smkern.latency import Chunk, Size, TablePredictor
from smkern.latency.table import Timing

PATH = Path("runtime.json")


def cell(name: str, value: float, provider: str = "stock", **about: object) -> dict:
    case = {"model": "qwen3-8b", "name": name}
    return {"op": "runtime", "case": case, "provider": provider, "value": value, **about}


def test_cells_become_times_of_the_suites_own_batch() -> None:
    cells = [
        cell("prefill_alone", 40.0, decode_ms=10.0),
        cell("mixed_forward", 12.0, chunk=64, by_start_ms={"0": 11.0, "2016": 12.0}),
        cell("mixed_forward", 9.0, provider="smkern", chunk=64, by_start_ms={"0": 9.0}),
        cell("steady", 20.0, alone_ms=18.0, tbt_p50_ms=25.0),
    ]
    cells[-1]["case"]["rung"] = 32
    assert stock_timings("qwen3-8b", cells, 132, PATH) == {
        Timing("prefill", 132, prompts=1, tokens=4096): 102_400.0,
        Timing("decode", 132, batch=64, context=2048): 10_000.0,
        Timing("mixed", 132, 64, 2048, 1, 64): 11_000.0,
        Timing("mixed", 132, 64, 2048, 1, 64, 2016): 12_000.0,
        Timing("decode", 32, batch=64, context=2048): 18_000.0,
        Timing("decode", 32, 64, 2048, beside_sms=100, beside_tokens=4096): 25_000.0,
        Timing(
            "prefill",
            100,
            prompts=1,
            tokens=4096,
            beside_sms=32,
            beside_batch=64,
            beside_context=2048,
        ): 204_800.0,
    }


def test_a_model_without_forwards_is_refused_with_the_command_that_measures_it() -> None:
    with pytest.raises(TableError, match=r"runtime\.json has no forwards.*--only stock"):
        stock_timings("qwen3-8b", [cell("prefill_alone", 40.0, decode_ms=10.0)], 132, PATH)


@pytest.mark.parametrize(("model", "layers"), [("qwen3-8b", 36), ("qwen3-32b", 64)])
def test_committed_times_come_back(model: str, layers: int) -> None:
    stock, ours = stock_predictor(model, "h200"), TablePredictor.load(model)
    forward = Size((Chunk(448),), layers, layers, True, 64, 64 * 2048)
    assert stock.alone_us(forward, 132) > ours.alone_us(forward, 132)


@pytest.mark.parametrize("name", ON_STOCK)
def test_they_are_policies_of_the_grid_alone(name: str) -> None:
    assert checked_policies([name, "chunked:64"]) == (name, "chunked:64")
    case = Case("qwen3-8b", "azure-code", 15.0, "fcfs", name)
    ours = Case("qwen3-8b", "azure-code", 15.0, "fcfs", name.removeprefix("stock_"))
    assert specs(case) == specs(ours), "tried with the same settings"
    stock, ours = simulated("qwen3-8b", policy="stock_chunked"), simulated("qwen3-8b")
    assert stock.predictor is stock_predictor("qwen3-8b", "h200")
    assert stock.sizes == ours.sizes
