"""`smkern.serve`: what it is given reaches the executor and the loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import smkern
from smkern import ops
from smkern.errors import ArgumentError
from smkern.kv import KvPool
from smkern.models import Decoder, SamplingParams, TensorParallel, Weights, graph
from smkern.policies import StaticSplit
from smkern.runtime import HostDevice, ModelExecutor, serving
from smkern.runtime.loading import kv_sizes
from tests.models.generation import Letters, tiny
from tests.runtime.alone import Alone, pool_of

pytestmark = pytest.mark.slow

CONFIG = tiny()
WEIGHTS = Weights.random(CONFIG, 3)
SIZES: dict[str, Any] = {"max_running": 4, "max_prefill": 2, "max_tokens": 64}
PROMPTS = [[1, 2, 3], [4, 5], [6] * 40, [7, 8, 9, 10]]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("policy", [None, StaticSplit(32, layers=1)])
def test_tokens_are_those_of_each_prompt_alone(policy: Any, same: bool) -> None:
    decoder = Decoder(CONFIG, WEIGHTS, batch_invariant=same)
    device = HostDevice(rungs=[32])
    mux = smkern.serve(
        decoder, pool_of(CONFIG, 32, reuse=not same), policy=policy, device=device, **SIZES
    )
    params = SamplingParams(max_new_tokens=6)
    handles = [mux.submit(prompt, params) for prompt in PROMPTS]
    for output in mux.run():
        assert output.error is None
    alone = Alone(decoder, CONFIG.max_position)
    for handle, prompt in zip(handles, PROMPTS, strict=True):
        assert list(handle.tokens) == alone.generate(prompt, params)
    mux.close()


def test_a_tokenizer_makes_texts() -> None:
    mux = smkern.serve(Decoder(CONFIG, WEIGHTS), pool_of(CONFIG, 32), tokenizer=Letters(), **SIZES)
    handle = mux.submit("hello", SamplingParams(max_new_tokens=3))
    texts = [output.text for output in mux.run()]
    assert handle.completion is not None
    assert "".join(text or "" for text in texts) == handle.completion.text


@pytest.mark.parametrize("policy", [None, StaticSplit(32, layers=1)])
@pytest.mark.parametrize("num_sms", [None, 16])
def test_every_operator_gets_its_budget(policy, num_sms, monkeypatch) -> None:
    """In mixed forwards, prefill batches, decode steps, and where tokens are drawn."""
    seen: list[int | None] = []

    def spy(owner: Any, name: str) -> None:
        wrapped = getattr(owner, name)

        def wrapper(*given: Any, **options: Any) -> Any:
            seen.append(options["num_sms"])
            return wrapped(*given, **options)

        monkeypatch.setattr(owner, name, wrapper)

    spy(ops, "paged_attention")
    spy(graph, "sample")
    device = HostDevice(rungs=[32])
    decoder = Decoder(CONFIG, WEIGHTS)
    mux = smkern.serve(
        decoder, pool_of(CONFIG, 32), policy=policy, device=device, num_sms=num_sms, **SIZES
    )
    for prompt in PROMPTS:
        mux.submit(prompt, SamplingParams(max_new_tokens=4))
    assert not [output.error for output in mux.run() if output.error]
    assert len(seen) > 10
    assert set(seen) == {num_sms}
    mux.close()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_what_launches_first_is_paid_before_it_serves(kind, monkeypatch) -> None:
    seen: list[Any] = []
    decoder = Decoder(CONFIG, WEIGHTS)
    monkeypatch.setattr(ModelExecutor, "warm", lambda self: seen.append("warm"))
    monkeypatch.setattr(ModelExecutor, "capture", lambda self, rungs: seen.append(rungs))
    if kind == "cuda":  # after the executor was made on CPU tensors
        made = serving.Multiplexer

        def on_a_gpu(*given: Any, **options: Any) -> Any:
            decoder.device = torch.device("cuda")
            return made(*given, **options)

        monkeypatch.setattr(serving, "Multiplexer", on_a_gpu)
    smkern.serve(decoder, pool_of(CONFIG, 32), rungs=[None, 32], **SIZES)
    assert seen == ([] if kind == "cpu" else ["warm", [None, 32]])


def test_what_was_put_off_is_done_when_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs that were missed are captured then; one that cannot be stops nobody."""
    idles: list[bool] = []

    def idle(self: ModelExecutor) -> None:
        idles.append(mux.is_idle)
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ModelExecutor, "idle", idle)
    mux = smkern.serve(Decoder(CONFIG, WEIGHTS), pool_of(CONFIG, 32), **SIZES)
    handle = mux.submit([1, 2, 3], SamplingParams(max_new_tokens=3))
    while not handle.done:
        mux.step()
    assert not idles
    for _ in range(3):
        assert mux.step() == []
    assert idles == [True] * len(idles) != []
    assert any(note.name == "put off" for note in mux.timeline.trace().notes)
    handle = mux.submit([4, 5], SamplingParams(max_new_tokens=3))
    assert len([*mux.run()]) == 3
    mux.close()


@pytest.mark.parametrize(
    ("option", "words"),
    [({"preemption": "never"}, "preemption"), ({"stall_timeout_s": 0}, "stall_timeout_s"),
     ({"max_running": 0}, "max_running"), ({"ladder": [16]}, r"ladder=\[16\]: pass smkern.ladder")],
)  # fmt: skip
def test_settings_that_cannot_be_are_named(option: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        smkern.serve(Decoder(CONFIG, WEIGHTS), pool_of(CONFIG, 32), **SIZES | option)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"num_layers": 3}, "the pool has num_layers=3, the model 2"),
        ({"num_kv_heads": 2}, "num_kv_heads=2, the model 1"),
        ({"head_dim": 64}, "head_dim=64, the model 128"),
        ({"dtype": torch.float16}, "holds torch.float16, the model is in torch.float32: .*e4m3fn"),
    ],
)
def test_a_pool_of_another_model_is_refused(sizes: dict[str, Any], words: str) -> None:
    """It would be found out by each launch, and fail each request."""
    pool = KvPool(replace(kv_sizes(CONFIG, 16, None), **sizes), num_pages=4, device="cpu")
    with pytest.raises(ArgumentError, match=words):
        smkern.serve(Decoder(CONFIG, WEIGHTS), pool, **SIZES)


def test_a_part_of_a_model_is_refused() -> None:
    tp = TensorParallel(0, 2)
    config = tiny(num_q_heads=4, num_kv_heads=2)
    decoder = Decoder(config, Weights.random(config, shard=tp.shard), tp=tp)
    with pytest.raises(ArgumentError, match=r"one rank's part .*serve_ranks on all"):
        smkern.serve(decoder, pool_of(CONFIG, 32), **SIZES)
