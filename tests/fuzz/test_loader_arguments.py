"""Anything at all where a loader, a configuration or an `LLM` wants something: served or named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import smkern
from smkern.device import torch_device
from smkern.errors import SmkernError
from smkern.latency import TablePredictor
from smkern.latency.fitted import read_samples
from smkern.latency.profile_file import read_profile
from smkern.models import ModelConfig, MoeConfig, Weights, preset
from smkern.models.presets import find_model
from smkern.profile import load_profile
from smkern.replay import load_trace
from smkern.rope import Linear, Llama3, Rope, Yarn
from smkern.runtime.timeline.timeline import Timeline


class Odd:
    """Neither true nor false."""

    def __bool__(self) -> bool:
        raise RuntimeError("odd")


VALUES = (
    None, True, False, -1, 0, 1, 3, 64, 2**31, 2**70, 10**400, 0.5, float("nan"), float("inf"),
    -1.5, 1e300, "", "x", "5", "a\0b", "\udcff", b"x", [], [1], (1, 2), {}, {"a": 1}, set(),
    object(), Odd(), torch.zeros(2), torch.tensor(3), np.zeros(2), np.int64(3), Path("."),
    Path("/dev/zero"), print, 1j, torch.float16, torch.int8, "cuda", "cpu", "meta", range(3),
)  # fmt: skip
SMALL = preset("qwen3-8b").replace(
    vocab_size=32, hidden_size=64, intermediate_size=96, num_layers=1, num_q_heads=1,
    num_kv_heads=1, max_position=64, dtype=torch.float32,
)  # fmt: skip
NAMED = Weights.random(SMALL).named()
LLM = ("weights", "device", "dtype", "seed", "tokenizer", "num_pages", "memory_fraction",
       "page_size", "max_batch", "max_step_tokens", "max_context", "prefix_cache", "partition",
       "num_sms", "progress")  # fmt: skip


def of(make: Callable[..., Any], name: str, **rest: Any) -> Callable[[Any], Any]:
    """A call with a value under a name, and good ones under the others."""
    return lambda value: make(**{**rest, name: value})


def parts(kind: type, **good: Any) -> dict[str, Callable[[Any], Any]]:
    return {f"{kind.__name__} {x.name}": of(kind, x.name, **good) for x in fields(kind)}


def table(scaling: Any) -> Any:
    return Rope(64, scaling=scaling).table(8)


def small_llm(**changes: Any) -> None:
    sizes: dict[str, Any] = {"device": "cpu", "max_batch": 2, "max_context": 16, "num_pages": 8}
    smkern.LLM(SMALL, **sizes | changes).close()


CALLS: dict[str, Callable[[Any], Any]] = {
    **{f"replace {x.name}": of(SMALL.replace, x.name) for x in fields(ModelConfig)},
    **parts(MoeConfig, num_experts=8, top_k=2, intermediate_size=64),
    **parts(Rope, rotary_dim=64),
    **{name: lambda value, call=call: table(call(value)) for name, call in {
        **parts(Linear),
        **parts(Llama3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position=64),
        **parts(Yarn, factor=4.0, original_max_position=64),
    }.items()},
    "table position": Rope(64).table,
    "table device": of(Rope(64).table, "device", max_position=8),
    "table dtype": of(Rope(64).table, "dtype", max_position=8),
    "Rope.from_config": Rope.from_config,
    "from_hf": ModelConfig.from_hf,
    "preset": preset,
    "find_model": find_model,
    "Weights.load": Weights.load,
    "Weights.load config": of(Weights.load, "config", path="."),
    "Weights.random": Weights.random,
    "Weights.random seed": of(Weights.random, "seed", config=SMALL),
    "Weights.random device": of(Weights.random, "device", config=SMALL),
    "from_tensors": partial(Weights.from_tensors, SMALL),
    "from_tensors config": of(Weights.from_tensors, "config", tensors=NAMED),
    "from_tensors tensor": lambda value: Weights.from_tensors(
        SMALL, {**NAMED, "model.norm.weight": value}
    ),
    "load_profile": load_profile,
    "load_trace": load_trace,
    "load_trace requests": of(load_trace, "requests", source="conversation-like"),
    "load_trace seed": of(load_trace, "seed", source="conversation-like", requests=5),
    "Timeline.load": Timeline.load,
    "TablePredictor.load": TablePredictor.load,
    "TablePredictor.load gpu": of(TablePredictor.load, "gpu"),
    "TablePredictor.read": TablePredictor.read,
    "read_samples": read_samples,
    "read_profile": read_profile,
    "torch_device": torch_device,
    "LLM": of(smkern.LLM, "model", device="cpu"),
    **{f"LLM {name}": of(small_llm, name) for name in LLM},
}  # fmt: skip


def test_anything_is_served_or_refused_by_name(cases, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for random in cases(400):
        name, value = random.choice(sorted(CALLS)), random.choice(VALUES)
        print(name, type(value))
        with suppress(SmkernError):
            CALLS[name](value)
