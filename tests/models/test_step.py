"""Steps and activation buffers: their numbers, their memory, and what does not fit."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from smkern.bench.model.host_cost import layer_launch_us
from smkern.errors import ArgumentError, ConfigError
from smkern.models import (
    ActivationBuffers,
    Decoder,
    ModelConfig,
    Step,
    Weights,
    batch_invariant,
    decoder,
)
from smkern.models.batch_invariant import check_batch_invariant
from tests.models.peers import Peer, hf_config, prompts
from tests.models.session import Session

INT = torch.int32


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf(hf_config("qwen3")).replace(dtype=torch.float32)


def _step(config: ModelConfig, **changes) -> Step:
    """A decode step of two requests in buffers for four tokens of three requests."""
    pages = torch.zeros(config.num_layers, 2, 4, 16, config.num_kv_heads, config.head_dim)
    given = {
        "token_ids": torch.zeros(2, dtype=INT),
        "kv_lens": torch.ones(2, dtype=INT),
        "page_table": torch.tensor([[0], [1]], dtype=INT),
        "caches": [(layer[0], layer[1]) for layer in pages],
        "max_kv_len": 16,
    }
    return Step.make(ActivationBuffers(config, 4, 3), **(given | changes))


REFUSED = [
    ({"token_ids": torch.zeros(1, 2, dtype=INT)}, r"token_ids has shape \[1, 2\].*vectors"),
    ({"token_ids": torch.zeros(3, dtype=INT)}, "3 tokens for 2 requests: without cu_q_lens"),
    ({"caches": []}, "0 pairs of caches for 2 layers"),
    ({"max_kv_len": 513}, "max_kv_len=513: the model's context has 512 tokens"),
    (
        {"kv_lens": torch.ones(2, dtype=INT, device="meta")},
        "kv_lens is on meta, the activations on cpu",
    ),
    (
        {
            "token_ids": torch.zeros(5, dtype=INT),
            "cu_q_lens": torch.tensor([0, 2, 5], dtype=INT),
            "max_q_len": 3,
        },
        "a step of 5 tokens and 2 requests in buffers for 4 and 3",
    ),
    (
        {"token_ids": torch.zeros(4, dtype=INT), "kv_lens": torch.ones(4, dtype=INT)},
        "4 tokens and 4 requests in buffers for 4 and 3",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda x: str(x)[:24])
def test_what_does_not_fit_is_named(config: ModelConfig, changes, message):
    with pytest.raises(ArgumentError, match=message):
        _step(config, **changes)


@pytest.mark.parametrize(
    ("batch", "max_batch", "rows"), [(1, 40, 1), (3, 40, 4), (17, 40, 32), (33, 40, 40), (3, 3, 3)]
)
def test_last_rows_are_padded_as_far_as_buffers_go(config: ModelConfig, batch, max_batch, rows):
    pages = torch.zeros(config.num_layers, 2, 4, 16, config.num_kv_heads, config.head_dim)
    step = Step.make(
        ActivationBuffers(config, 64, max_batch),
        token_ids=torch.zeros(batch, dtype=INT),
        kv_lens=torch.ones(batch, dtype=INT),
        page_table=torch.zeros(batch, 1, dtype=INT),
        caches=[(layer[0], layer[1]) for layer in pages],
        cu_q_lens=torch.arange(batch + 1, dtype=INT),
        max_kv_len=16,
    )
    ends = step.ends()
    assert [len(x) for x in (ends.hidden, ends.last_rows, ends.logits)] == [rows] * 3
    assert step.buffers.logits.shape[0] == batch
    assert step.buffers.logits.data_ptr() == ends.logits.data_ptr()


def test_empty_buffers_are_refused(config: ModelConfig):
    with pytest.raises(ArgumentError, match="max_tokens=0"):
        ActivationBuffers(config, 0)


def test_bytes_of_buffers_are_counted(config: ModelConfig):
    small, large = ActivationBuffers(config, 4, 3), ActivationBuffers(config, 8, 3)
    rows = 2 * config.hidden_size + config.qkv_size + config.q_size + config.intermediate_size
    assert large.num_bytes - small.num_bytes == 4 * rows * 4


def test_buffers_are_views_of_one_memory(config: ModelConfig):
    activations = ActivationBuffers(config, 4, 3)
    whole, part = activations.buffers(4, 3), activations.buffers(2, 1)
    assert part.hidden.data_ptr() == whole.hidden.data_ptr()
    assert part.q.data_ptr() == part.qkv.data_ptr()
    assert part.v.shape == (2, config.num_kv_heads, config.head_dim)
    assert part.logits.shape == (1, config.vocab_size)


def test_requests_longer_than_the_decoders_table(config: ModelConfig):
    decoder = Decoder(config, Weights.random(config), max_position=8)
    with pytest.raises(ArgumentError, match="max_kv_len=16: this decoder was made for 8"):
        decoder.forward(_step(config))
    with pytest.raises(ArgumentError, match="max_position=513"):
        Decoder(config, Weights.random(config), max_position=513)


def test_fp32_is_for_the_cpu(config: ModelConfig):
    with pytest.raises(ConfigError, match=r"dtype=torch\.float32 on meta"):
        Decoder(config, Weights.empty(config, "meta"))


def test_experts_have_no_batch_invariant_mode():
    config = ModelConfig.from_hf(hf_config("qwen3_moe")).replace(dtype=torch.float32)
    weights = Weights.random(config)
    assert not Decoder(config, weights).batch_invariant
    with pytest.raises(ConfigError, match="8 experts: the grouped GEMM sums"):
        Decoder(config, weights, batch_invariant=True)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_gpus_where_triton_attends_have_no_batch_invariant_mode(config, capability, monkeypatch):
    info = SimpleNamespace(capability=capability, sm=10 * capability[0] + capability[1])
    monkeypatch.setattr(batch_invariant, "device_info", lambda index: info)
    is_refused = capability != (9, 0)
    with pytest.raises(ConfigError, match="on an sm_") if is_refused else nullcontext():
        check_batch_invariant(config, torch.device("cuda", 0))
    check_batch_invariant(config, torch.device("cpu"))


def test_a_batch_invariant_decoder_is_checked_with_its_device(config, monkeypatch):
    asked = []
    monkeypatch.setattr(decoder, "check_batch_invariant", lambda *given: asked.append(given))
    made = Decoder(config, Weights.random(config), batch_invariant=True)
    assert asked == [(made.config, torch.device("cpu"))]


def test_a_launch_is_timed_with_a_plan(config: ModelConfig):
    decoder = Decoder(config, Weights.random(config))
    with pytest.raises(ArgumentError, match=r"pass step\.planned"):
        layer_launch_us(decoder, _step(config))


def test_all_lengths_can_be_bounded_together(config: ModelConfig):
    for bound, want in ((None, 1024), (64, 64)):
        plan = _step(config, max_kv_len=512, max_total_kv=bound).planned().plan
        assert plan is not None
        assert plan.shape.max_total_kv == want


def test_no_buffer_is_read_before_it_is_written(peer: Peer):
    """Buffers full of NaN give the same logits; so do those that held another step."""
    texts = prompts((9, 21))
    decoder = peer.decoder()
    first, second = Session.make(decoder, 2), Session.make(decoder, 2)
    buffers = second.activations.buffers(
        second.activations.max_tokens, second.activations.max_batch
    )
    for name in (
        "hidden",
        "normed",
        "qkv",
        "attended",
        "last",
        "last_attended",
        "last_normed",
        "logits",
    ):
        getattr(buffers, name).fill_(float("nan"))
    if buffers.moe is not None:
        for name in ("router_logits", "weights", "rows", "gated", "outs"):
            getattr(buffers.moe, name).fill_(float("nan"))
    want = first.logits(texts)
    assert torch.equal(second.logits(texts), want)
    other = Session.make(decoder, 2)
    other.activations = first.activations
    assert torch.equal(other.logits(texts), want)
