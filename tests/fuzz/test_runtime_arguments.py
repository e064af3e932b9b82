"""Arguments of the runtime's public functions that are anything: served, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

import numpy as np
import torch

from smkern import LLM
from smkern.errors import SmkernError
from smkern.models import SamplingParams
from smkern.runtime import Interleaver, ModelExecutor, Multiplexer, SimDevice, SimExecutor
from tests.fuzz.conftest import Cases
from tests.models.generation import Letters, make_llm, tiny
from tests.runtime.tensors import one_thread
from tests.runtime.world import RUNGS, Linear, small_config


class Hostile:
    """Raises, whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    def __len__(self) -> int:
        raise RuntimeError("len")

    def __iter__(self) -> Any:
        raise RuntimeError("iter")


VALUES: list[Callable[[], Any]] = [
    lambda: None, lambda: -1, lambda: 0, lambda: 1, lambda: 3, lambda: 1.5, lambda: float("nan"),
    lambda: float("inf"), lambda: "x", lambda: "", lambda: b"x", list, lambda: [1], lambda: [None],
    lambda: ["a"], dict, object, lambda: 2**70, lambda: -(2**70), lambda: 10**5000, lambda: True,
    lambda: np.array([1, 2]), lambda: np.int64(3), lambda: torch.tensor(3), lambda: {1, 2},
    lambda: torch.tensor([1, 2]), Hostile, lambda: [Hostile()], lambda: range(3), lambda: [[1]],
    lambda: [2**70], lambda: "\ud800", lambda: ..., lambda: int, lambda: complex(1, 2),
]  # fmt: skip


def sim_device(**given: Any) -> SimDevice:
    return SimDevice(**{"num_sms": 132, "rungs": RUNGS, "predictor": Linear()} | given)


def sim_executor(**given: Any) -> SimExecutor:
    sizes = {"num_pages": 30, "page_size": 4, "max_running": 4, "max_prefill": 3, "max_tokens": 32}
    return SimExecutor(small_config(), sim_device(), **sizes | given)


def serve(mux: Multiplexer, prompt: Any = (1, 2), params: Any = None, **given: Any) -> None:
    """One request to the end, and whatever came of it another; closed."""
    with suppress(SmkernError):
        mux.submit(prompt, SamplingParams(2) if params is None else params, **given)
    assert mux.dead is None, mux.dead
    for output in mux.run():
        assert output.error is None or isinstance(output.error, SmkernError)
    mux.close()


@cache
def llm() -> LLM:
    return make_llm(tokenizer=Letters(), max_step_tokens=64)


def model_executor(**given: Any) -> ModelExecutor:
    parts = {"model": llm().decoder, "pool": llm().pool, "max_running": 2, "max_tokens": 32}
    return ModelExecutor(**parts | given)


TARGETS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "Multiplexer": (
        lambda **given: serve(Multiplexer(sim_executor(), **given)),
        ("policy", "tokenizer", "seed", "preemption", "batch_invariant", "impatient",
         "stall_timeout_s", "timeline", "log"),
    ),
    "submit": (
        lambda **given: serve(Multiplexer(sim_executor(), tokenizer=Letters()), **given),
        ("prompt", "params", "priority", "deadline_ms"),
    ),
    "cancel": (lambda request: Multiplexer(sim_executor()).cancel(request), ("request",)),
    "SamplingParams": (
        lambda **given: serve(
            Multiplexer(sim_executor(), tokenizer=Letters()), params=SamplingParams(**given)
        ),
        ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop",
         "stop_token_ids", "ignore_eos"),
    ),
    "SimExecutor": (
        lambda **given: serve(Multiplexer(sim_executor(**given))),
        ("num_pages", "page_size", "max_running", "max_prefill", "max_tokens", "max_context",
         "end_probability", "reuse", "checks"),
    ),
    "SimDevice": (
        sim_device,
        ("num_sms", "rungs", "predictor", "decode_launch_us", "prefill_launch_us",
         "decode_gap_us", "faults"),
    ),
    "aim": (lambda **given: Interleaver(sim_device()).aim(**{"rung": 16} | given),
            ("rung", "prefill")),
    "Interleaver": (lambda **given: Interleaver(sim_device(), **given), ("max_queued",)),
    "LLM": (
        lambda **given: LLM(**{"model": tiny(), "device": "cpu", "num_pages": 8} | given),
        ("model", "weights", "device", "dtype", "seed", "tokenizer", "page_size", "max_batch",
         "max_step_tokens", "max_context", "prefix_cache", "partition", "num_sms"),
    ),
    "generate": (
        lambda **given: llm().generate(**{"prompts": [1], "params": SamplingParams(2)} | given),
        ("prompts", "params"),
    ),
    "ModelExecutor": (
        model_executor,
        ("model", "pool", "device", "max_running", "max_prefill", "max_tokens", "max_context",
         "num_sms"),
    ),
}  # fmt: skip


def test_anything_is_served_or_refused_by_name(cases: Cases) -> None:
    with one_thread():
        for draw in cases(400):
            name = draw.choice([x for x, (_, options) in TARGETS.items() for _ in options])
            target, options = TARGETS[name]
            option = draw.choice(options)
            value = _value(draw)
            with suppress(SmkernError):
                target(**{option: value})


def test_a_prompt_of_anything_among_others(cases: Cases) -> None:
    with one_thread():
        for draw in cases(40):
            prompts = [[1, 2], _value(draw)]
            with suppress(SmkernError):
                assert len(llm().generate(prompts, SamplingParams(2))) == 2


def _value(draw: Random) -> Any:
    return draw.choice(VALUES)()
