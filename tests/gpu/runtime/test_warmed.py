"""What was launched before serving, by the names of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from smkern.models import DecodeGraph, DecodeInputs, Decoder, SamplingParams, Weights, preset
from smkern.models.layered import all_layers, warming_layers
from smkern.server.model import EngineOptions, open_runtime
from tests.gpu.models.support import small_weights
from tests.models.peers import FAMILIES, prompts
from tests.models.session import Session

LAYERS = 5
LENGTHS = (5, 64, 100)
CONFIG = preset("qwen3-8b").replace(num_layers=3, vocab_size=8192)
SIZES: dict[str, Any] = {
    "rungs": (24,), "max_running": 40, "max_prefill": 4, "max_tokens": 1024, "max_context": 3072,
    "num_pages": 4000,
}  # fmt: skip
ROUNDS = 3


@contextmanager
def kernels() -> Iterator[set[str]]:
    """Gets the names of the kernels that the block launches."""
    names: set[str] = set()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        yield names
        torch.cuda.synchronize()
    names |= {
        event.name
        for event in found.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    }
    assert names


@pytest.mark.parametrize("dtype", [None, "fp8-channel"])
@pytest.mark.parametrize("family", FAMILIES)
def test_warming_layers_launch_the_kernels_of_all(family: str, dtype: Any) -> None:
    config = small_weights(family).config.replace(num_layers=LAYERS)
    weights = Weights.random(config, 5, "cuda", dtype=dtype)
    decoder = Decoder(weights.config, weights)
    session = Session.make(decoder, len(LENGTHS), 832)
    session.logits(prompts(LENGTHS))
    inputs = DecodeInputs.make(len(LENGTHS), session.page_table, max_kv_len=832)
    step = DecodeGraph(decoder, inputs, session.caches, max_kv_len=832, capture=False)
    runs: list[Callable[[], None]] = [
        lambda: step.run_eagerly(warming_layers), lambda: step.run_eagerly(all_layers)
    ]  # fmt: skip
    launched = []
    for run in runs:
        with kernels() as names:
            run()
        launched.append(names)
    assert launched[0] == launched[1]


@pytest.mark.parametrize(("policy", "least_places"), [("adaptive", 1), ("static_split:24", 2)])
def test_serving_launches_no_kernel_for_the_first_time(policy: str, least_places: int) -> None:
    """In chunks with rows that decode, and on both sides of a split."""
    draw = Random(7)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    with kernels() as warmed:
        runtime = open_runtime(EngineOptions(CONFIG, policy=policy, tbt_ms=2.0, **SIZES))
        mux, _ = runtime.__enter__()
    try:
        with kernels() as served:
            for _ in range(ROUNDS):
                handles = []
                for _ in range(60):
                    prompt = [draw.randrange(CONFIG.vocab_size)] * draw.randrange(1, 1500)
                    handles.append(mux.submit(prompt, params))
                    for _ in range(draw.randrange(40)):
                        mux.step()
                for output in mux.run():
                    assert output.error is None
                assert all(len(handle.tokens) == 40 for handle in handles)
        places = {span.place.num_sms for span in mux.timeline.trace().spans}
    finally:
        runtime.__exit__(None, None, None)
    assert len(places) >= least_places
    assert served - warmed == set()
