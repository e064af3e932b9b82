"""What is compiled and loaded before a runtime serves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smkern.models import preset
from smkern.runtime.model import warming


@pytest.mark.parametrize("split", [True, False])
def test_forwards_of_any_size_are_warmed_on_every_side(monkeypatch, split: bool) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(warming, "warmup", lambda **given: asked.update(given))
    monkeypatch.setattr(warming, "device_info", lambda: SimpleNamespace(num_sms=132))
    ladder: Any = [SimpleNamespace(decode=n, prefill=132 - n) for n in (32, 48)] if split else None
    warming.warm_kernels(
        preset("qwen3-8b"), ladder, page_size=16, max_running=72, max_prefill=4, max_tokens=4096
    )
    assert asked["budgets"] == ([132, 32, 100, 48, 84] if split else [132])
    (calls,) = asked["calls"]
    # a mixed forward has all decode rows behind a batch of prompts, and logits of both
    assert (calls.max_tokens, calls.max_batch, calls.max_q_len) == (4096 + 72, 4 + 72, 4096)
