"""The weights of one layer, as the operators read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from smkern.limits import FP8_BLOCK
from smkern.models.config import ModelConfig
from smkern.ops.checks import FP8 as FP8


@dataclass(frozen=True, slots=True, eq=False)
class Scales:
    """What fp8 values of a product are multiplied by.

    Attributes:
        weight: fp32: [N / 128, K / 128] of a weight [N, K] in blocks, otherwise [N, 1]; of experts
            with a leading [num_experts].
        input: [1] fp32 where the inputs' scale is static; None where it follows from the values.
    """

    weight: Tensor
    input: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LayerScales:
    """The scales of a layer's products; None where the weight is not fp8. `gate_up` and `down` are
    the MLP's or the experts'."""

    qkv: Scales | None = None
    o: Scales | None = None
    gate_up: Scales | None = None
    down: Scales | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once."""
        for scales in (self.qkv, self.o, self.gate_up, self.down):
            if scales is not None:
                yield scales.weight
                if scales.input is not None:
                    yield scales.input


UNSCALED = LayerScales()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """The weights that every layer has.

    Of a quantized model `qkv`, `o` and the MLP's, or the experts', weights are float8_e4m3fn.

    Attributes:
        input_norm: [hidden_size].
        qkv: [(q_heads + 2 kv_heads) * head_dim, hidden_size]: queries, keys, values.
        qkv_bias: [(q_heads + 2 kv_heads) * head_dim], or None.
        q_norm: [head_dim], or None.
        k_norm: Likewise.
        o: [hidden_size, q_heads * head_dim].
        post_norm: [hidden_size], before the MLP.
        scales: Those of a quantized model's products.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    post_norm: Tensor
    scales: LayerScales = field(default=UNSCALED, kw_only=True)

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor once, scales last."""
        for name in type(self).__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                yield value
        yield from self.scales.tensors()


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


class Make(Protocol):
    """Makes an uninitialised tensor."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor: ...


def empty_layer(config: ModelConfig, make: Make) -> Layer:
    """A layer of uninitialised tensors, each made by `make(*shape, dtype=...)`."""
    hidden, moe, dtype = config.hidden_size, config.moe, config.dtype
    stored = dtype if config.quantization is None else FP8
    input_norm = make(hidden, dtype=dtype)
    qkv = make(config.qkv_size, hidden, dtype=stored)
    qkv_bias = make(config.qkv_size, dtype=dtype) if config.qkv_bias else None
    q_norm = make(config.head_dim, dtype=dtype) if config.qk_norm else None
    k_norm = make(config.head_dim, dtype=dtype) if config.qk_norm else None
    o, post_norm = make(hidden, config.q_size, dtype=stored), make(hidden, dtype=dtype)
    if moe is None:
        width = config.intermediate_size
        gate_up = make(2 * width, hidden, dtype=stored)
        down = make(hidden, width, dtype=stored)
        return DenseLayer(
            input_norm, qkv, qkv_bias, q_norm, k_norm, o, post_norm, gate_up, down,
            scales=_empty_scales(config, [qkv, o, gate_up, down], make),
        )  # fmt: skip
    width, experts = moe.intermediate_size, moe.num_experts
    router = make(experts, hidden, dtype=dtype)
    gate_up = make(experts, 2 * width, hidden, dtype=stored)
    down = make(experts, hidden, width, dtype=stored)
    return MoeLayer(
        input_norm, qkv, qkv_bias, q_norm, k_norm, o, post_norm, router, gate_up, down,
        scales=_empty_scales(config, [qkv, o, gate_up, down], make),
    )  # fmt: skip


def _empty_scales(config: ModelConfig, weights: list[Tensor], make: Make) -> LayerScales:
    """Scales of a quantized model's products; static ones of inputs are 0, to be raised."""
    given = config.quantization
    if given is None:
        return UNSCALED
    made = []
    for weight in weights:
        *experts, rows, columns = weight.shape
        blocks = given.kind == "fp8-block"
        shape = [rows // FP8_BLOCK, columns // FP8_BLOCK] if blocks else [rows, 1]
        scale = make(*experts, *shape, dtype=torch.float32)
        static = given.activations == "static"
        made.append(Scales(scale, make(1, dtype=torch.float32).zero_() if static else None))
    return LayerScales(*made)
