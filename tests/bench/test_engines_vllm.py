"""What is watched of vLLM's rows and prompts, on a scheduler that stands for its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from smkern.bench.engines import vllm_engine
from smkern.bench.engines.cases import LIMITS_MS, EngineLoad
from smkern.bench.engines.steps import Step
from smkern.bench.engines.vllm_engine import NO_BUDGET, VllmEngine, write_config
from smkern.bench.power import PowerMeter
from smkern.models import ModelConfig, preset

LOAD = EngineLoad(rows=4, context=64, prompt=40)


class Scheduled:
    """Steps of 1 ms and 0.1 ms a prompt token; rows first, then prompts in the order they came."""

    def __init__(self, model: str, max_context: int, kv_tokens: int, **options: Any) -> None:
        self.now_s, self.budget = 0.0, NO_BUDGET
        self.waiting: deque[list[Any]] = deque()
        self.rows: dict[str, int] = {}
        self.steps: list[Step] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.rows or self.waiting)

    def add(self, name: str, ids: Sequence[int], new: int) -> None:
        self.waiting.append([name, len(ids), new])

    def set_token_budget(self, tokens: int) -> None:
        self.budget = tokens

    def step(self) -> list[Any]:
        left, outputs, prompt_tokens, old = self.budget - len(self.rows), [], 0, len(self.rows)
        for name in [*self.rows]:
            outputs.append(SimpleNamespace(request_id=name))
            self._drawn(name)
        while self.waiting and left > 0:
            first = self.waiting[0]
            done = min(first[1], left)
            first[1], left = first[1] - done, left - done
            prompt_tokens += done if first[0].startswith("p") else 0
            if not first[1]:
                name, _, new = self.waiting.popleft()
                self.rows[name] = new
                outputs.append(SimpleNamespace(request_id=name))
                self._drawn(name)
        self.now_s += 1e-3 + 1e-4 * prompt_tokens
        self.steps.append(Step(self.now_s, old, prompt_tokens))
        return outputs

    def _drawn(self, name: str) -> None:
        self.rows[name] -= 1
        if not self.rows[name]:
            del self.rows[name]

    def taken_steps(self) -> list[Step]:
        found, self.steps = self.steps, []
        return found

    def drain(self) -> None:
        self.rows.clear()
        self.waiting.clear()


@pytest.fixture
def engine(monkeypatch) -> VllmEngine:
    monkeypatch.setattr(vllm_engine, "Vllm", Scheduled)
    monkeypatch.setattr(vllm_engine.torch.cuda, "current_device", lambda: 0)
    meter = PowerMeter(lambda: (1500.0, 690.0))
    monkeypatch.setattr(vllm_engine, "power_meter", lambda device: meter)
    return VllmEngine(LOAD)


def test_rows_alone_and_beside_prompts_of_a_budget(engine: VllmEngine) -> None:
    alone = engine.watch(None, 32)
    assert alone.times_ms == pytest.approx([1.0] * 32)
    for budget in (20, 36):
        found = engine.watch(budget, 32)
        assert found.times_ms == pytest.approx([1.0 + 0.1 * (budget - 4)] * 32)
        assert found.prompt_tokens == 32 * (budget - 4)
        assert (found.sm_mhz, found.watts) == (1500.0, 690.0)


@pytest.mark.parametrize("model", LIMITS_MS)
def test_vllm_is_told_the_sizes_of_a_model(model: str, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = preset(model)
    assert ModelConfig.from_hf(write_config(config, model)) == config


def test_prompts_alone(engine: VllmEngine) -> None:
    # all fit a step where no budget is set: tokens over the time of the steps behind the first
    engine._vllm.set_token_budget = lambda tokens: setattr(engine._vllm, "budget", 80)
    assert engine.prefill_rate() == pytest.approx(80 / 9.0)
