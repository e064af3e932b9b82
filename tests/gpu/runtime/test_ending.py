"""On a GPU: an LLM behind an interrupt, and a runtime that leaves a hung launch behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from smkern import LLM
from smkern.errors import StalledError
from smkern.models import Decoder, SamplingParams, Weights
from smkern.runtime import ModelExecutor, Multiplexer
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.place import Place
from tests.gpu.models.support import small_weights
from tests.models.generation import assert_nothing_leaked, greedy
from tests.runtime.alone import pool_of

NEW = 12


@pytest.fixture(scope="module")
def weights() -> Weights:
    return small_weights()


@pytest.mark.parametrize("turn", [1, 2, 7])
def test_an_llm_generates_again_behind_an_interrupted_launch(weights, turn, monkeypatch) -> None:
    llm = LLM(weights.config, weights=weights, num_pages=64, max_batch=4, prefix_cache=False)
    prompt = list(range(1, 40))
    whole = llm.generate(prompt, greedy(NEW, ignore_eos=True))[0].tokens
    launch, left = CudaDevice.launch, [turn]

    def interrupted(self: CudaDevice, *given: Any) -> Any:
        left[0] -= 1
        event = launch(self, *given)
        if not left[0]:
            raise KeyboardInterrupt
        return event

    with monkeypatch.context() as patched:
        patched.setattr(CudaDevice, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, greedy(NEW, ignore_eos=True))
    assert_nothing_leaked(llm)
    assert llm.generate(prompt, greedy(NEW, ignore_eos=True))[0].tokens == whole
    assert_nothing_leaked(llm)
    llm.close()


def test_a_launch_that_hangs_is_left_behind_by_force(weights: Weights) -> None:
    """The stream waits for a number that the host writes at last."""
    config = weights.config
    pool = pool_of(config, 64, device="cuda")
    executor = ModelExecutor(
        Decoder(config, weights), pool, max_running=4, max_prefill=2, max_tokens=256
    )
    gate = torch.zeros(1, dtype=torch.int32).pin_memory()
    decode, hung = executor.decode, []

    def hangs(*given: Any) -> Any:
        works = decode(*given)
        if hung:
            return works
        work, draw = works[0]

        def run(place: Place) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            (code,) = driver.cuStreamWaitValue32(stream, gate.data_ptr(), 1, 0)
            assert code == driver.CUresult.CUDA_SUCCESS
            work.run(place)

        hung.append(True)
        return [(replace(work, run=run), draw), *works[1:]]

    executor.decode = hangs  # type: ignore[method-assign]
    mux = Multiplexer(executor, stall_timeout_s=0.2)
    handle = mux.submit(list(range(1, 40)), SamplingParams(NEW, ignore_eos=True))
    try:
        with pytest.raises(StalledError, match="nothing has ended"):
            list(mux.run())
        with pytest.raises(StalledError):
            mux.close()
        mux.close(force=True)
        assert handle.done
        assert pool.requests == ()
        assert pool.poll() > 0, "its pages are given to nobody while it may write them"
    finally:
        gate[0] = 1
    executor.close()
    assert pool.poll() == 0
    assert pool.usage.held == 0
    pool.check()
