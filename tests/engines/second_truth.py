"""What the second engine's model computes, in plain torch, of a whole text at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.engines.second_model import EPS, Model, turned


def logits(model: Model, ids: list[int]) -> Tensor:
    """[tokens, vocab] fp32 on the CPU."""
    s, hidden = model.sizes, _plain(model.embedding)[ids]
    angles = torch.arange(len(ids))[:, None] * model.frequencies.cpu()
    for weights in model.layers:
        norm, qkv, o, mlp_norm, gate_up, down = map(_plain, weights)
        heads = (_normed(hidden, norm) @ qkv.T).unflatten(1, (-1, s.head_dim)).transpose(0, 1)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads])
        q, k = turned(q, angles), turned(k, angles)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        hidden = hidden + found.transpose(0, 1).flatten(1) @ o.T
        gate, up = (_normed(hidden, mlp_norm) @ gate_up.T).chunk(2, 1)
        hidden = hidden + (functional.silu(gate) * up) @ down.T
    return _normed(hidden, _plain(model.norm)) @ _plain(model.unembedding).T


def greedy(model: Model, ids: list[int], count: int) -> list[int]:
    """`count` tokens behind a prompt, all of it computed anew for each."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[-count:]


def _plain(x: Tensor) -> Tensor:
    return x.float().cpu()


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, EPS)
