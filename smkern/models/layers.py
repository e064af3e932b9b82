"""The weights of one layer, as the operators read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from smkern.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """The weights that every layer has.

    Attributes:
        input_norm: [hidden_size].
        qkv: [(q_heads + 2 kv_heads) * head_dim, hidden_size]: queries, keys, values.
        q_norm: [head_dim], or None.
        k_norm: Likewise.
        o: [hidden_size, q_heads * head_dim].
        post_norm: [hidden_size], before the MLP.
    """

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DenseLayer(AttentionWeights):
    """A layer with one MLP.

    Attributes:
        gate_up: [2 * intermediate_size, hidden_size]: gate rows, then up rows.
        down: [hidden_size, intermediate_size].
    """

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MoeLayer(AttentionWeights):
    """A layer with a mixture of experts, each of width I.

    Attributes:
        router: [num_experts, hidden_size].
        w_gate_up: [num_experts, 2 I, hidden_size]: gate rows, then up rows.
        w_down: [num_experts, hidden_size, I].
    """

    router: Tensor
    w_gate_up: Tensor
    w_down: Tensor


Layer = DenseLayer | MoeLayer


def empty_layer(config: ModelConfig, make: Callable[..., Tensor]) -> Layer:
    """A layer of uninitialised tensors, each made by `make(*shape)`."""
    hidden, moe = config.hidden_size, config.moe
    input_norm, qkv = make(hidden), make(config.qkv_size, hidden)
    q_norm = make(config.head_dim) if config.qk_norm else None
    k_norm = make(config.head_dim) if config.qk_norm else None
    o, post_norm = make(hidden, config.q_size), make(hidden)
    if moe is None:
        width = config.intermediate_size
        gate_up, down = make(2 * width, hidden), make(hidden, width)
        return DenseLayer(input_norm, qkv, q_norm, k_norm, o, post_norm, gate_up, down)
    return MoeLayer(
        input_norm, qkv, q_norm, k_norm, o, post_norm,
        make(moe.num_experts, hidden),
        make(moe.num_experts, 2 * moe.intermediate_size, hidden),
        make(moe.num_experts, hidden, moe.intermediate_size),
    )  # fmt: skip


def layer_tensors(layer: Layer) -> Iterator[Tensor]:
    """Every tensor of a layer."""
    for name in type(layer).__dataclass_fields__:
        value = getattr(layer, name)
        if value is not None:
            yield value
