"""What the models' tests on a GPU share: models of real width, runs of ours and of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smkern.models import DecodeGraph, DecodeInputs, Decoder, ModelConfig, Weights
from tests.models.peers import Peer, error, hf_config, make_peer
from tests.models.session import Session

DEVICE = "cuda"
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 14_336, "vocab_size": 128_256,
              "num_key_value_heads": 8},
    "qwen2": {"hidden_size": 3584, "intermediate_size": 18_944, "vocab_size": 152_064,
              "num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen3": {"hidden_size": 4096, "intermediate_size": 12_288, "vocab_size": 151_936,
              "num_key_value_heads": 8},
    "qwen3_moe": {"hidden_size": 2048, "moe_intermediate_size": 768, "vocab_size": 151_936,
                  "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
}  # fmt: skip
"""Llama-3.1-8B, Qwen2.5-7B, Qwen3-8B and Qwen3-30B-A3B, of four layers."""
ALL_WIDE: dict[str, Any] = {
    "num_attention_heads": 32,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}
TEXTS = (1, 16, 17, 33, 64, 100, 129, 250, 256, 300, 511, 700)
MOST = 832
"""Tokens of the longest request: its prompt and what is decoded."""
SLACK = 1.2
"""Our error over transformers', both against fp32."""
CLEAR = 8.0
"""Two logits are apart if they differ by so many of their errors' root mean squares."""


def small_weights(family: str = "qwen3", max_position: int = 1024) -> Weights:
    """Random weights in bf16 of a small model."""
    config = ModelConfig.from_hf(hf_config(family, max_position_embeddings=max_position))
    return Weights.random(config.replace(dtype=torch.bfloat16), 5, DEVICE)


def gpu_peer(family: str, width: str) -> Peer:
    """A random fp32 model of transformers on the GPU."""
    torch.manual_seed(11)
    changes = {} if width == "small" else ALL_WIDE | WIDE[family]
    changes = {"max_position_embeddings": 4096} | changes
    return make_peer(family, device=DEVICE, **changes)


def assert_likely(
    peer: Peer, texts: Sequence[Sequence[int]], drawn: Sequence[Sequence[int]]
) -> None:
    """Each greedy token is the fp32 model's likeliest, but for what rounding to bf16 explains."""
    likely = total = 0
    for text, tokens in zip(texts, drawn, strict=True):
        ids = [*text, *tokens]
        want = peer.logits(ids)[len(text) - 1 : -1]
        with peer.running_in(torch.bfloat16):
            rounded = peer.logits(ids)[len(text) - 1 : -1]
        noise = (rounded - want).square().mean().sqrt()
        chosen = torch.tensor(tokens, device=want.device)
        gap = want.amax(-1) - want.gather(1, chosen[:, None])[:, 0]
        likely += int((gap <= CLEAR * noise).sum())
        total += len(tokens)
    # where two experts are as good as equal, rounding decides
    allowed = total // 10 if peer.family == "qwen3_moe" else 0
    assert total - likely <= allowed, f"{total - likely} of {total} tokens are unlikely"


@dataclass(slots=True)
class Pair:
    """A model of transformers, and our decoder with its weights in bf16."""

    peer: Peer
    decoder: Decoder

    @classmethod
    def make(cls, family: str, width: str) -> Pair:
        peer = gpu_peer(family, width)
        return cls(peer, peer.decoder(torch.bfloat16, DEVICE))

    @property
    def vocab(self) -> int:
        return self.decoder.config.vocab_size

    def session(self, batch: int) -> Session:
        return Session.make(self.decoder, batch, MOST)

    def assert_errs_no_more(self, got: Tensor, texts: Sequence[Sequence[int]]) -> None:
        """Our logits behind the texts' last tokens against transformers' in bf16 and in fp32."""
        want = self.peer.last_logits(texts, torch.float32)
        theirs = self.peer.last_logits(texts, torch.bfloat16)
        ours, bound = (error(x, want, self.peer.family) for x in (got, theirs))
        assert ours <= SLACK * bound, f"{ours:.2e}, transformers' {bound:.2e}"


def decode_graph(session: Session, first: Tensor, **options: Any) -> DecodeGraph:
    """A graph that goes on where a session's requests are, `first` being their next tokens."""
    batch = len(session.lengths)
    inputs = DecodeInputs.make(batch, session.page_table, max_kv_len=session.max_kv_len)
    graph = DecodeGraph(
        session.decoder, inputs, session.caches, max_kv_len=session.max_kv_len, **options
    )
    lengths = torch.tensor(session.lengths, dtype=torch.int32, device=first.device)
    inputs.token_ids.copy_(first)
    inputs.kv_lens.copy_(lengths + 1)
    inputs.finished.fill_(False)
    torch.cuda.synchronize()
    return graph


def check_decoded(pair: Pair, texts: list[list[int]], tokens: Tensor, logits: Tensor) -> None:
    """Greedy tokens [steps, batch] and their logits [steps, batch, vocab] against fp32.

    `texts` end with the first token that was fed. transformers reads what we decoded, in one run a
    request.
    """
    steps = len(tokens)
    full = [[*text, *tokens[:-1, i].tolist()] for i, text in enumerate(texts)]
    want = torch.stack([pair.peer.logits(text, steps) for text in full], 1)
    with pair.peer.running_in(torch.bfloat16):
        theirs = torch.stack([pair.peer.logits(text, steps) for text in full], 1)
    family = pair.peer.family
    bound = error(theirs.flatten(0, 1), want.flatten(0, 1), family)
    ours = error(logits.flatten(0, 1), want.flatten(0, 1), family)
    assert ours <= SLACK * bound, f"{ours:.2e}, transformers' {bound:.2e}"
    near = _rows(logits - want) <= 4 * bound
    if family == "qwen3_moe":  # a choice of experts that rounding decides moves a whole row
        assert near.float().mean() >= (_rows(theirs - want) <= 4 * bound).float().mean() - 0.1
    else:
        assert near.all()
    top = want.topk(2, -1)
    clear = near & (top.values[..., 0] - top.values[..., 1] > CLEAR * bound)
    assert clear.float().mean() > 0.2, "hardly a token is decided by more than rounding"
    assert torch.equal(tokens[clear].long(), top.indices[..., 0][clear])


def _rows(difference: Tensor) -> Tensor:
    """The root mean square of each row."""
    return difference.square().mean(-1).sqrt()
