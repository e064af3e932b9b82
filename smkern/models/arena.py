"""The memory of a forward: allocated once for a largest step, and written by every operator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.errors import ArgumentError
from smkern.models.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class MoeBuffers:
    """What a mixture of experts writes in a layer; a slot is one of a token's experts.

    Attributes:
        router_logits: [tokens, num_experts].
        weights: [tokens, top_k] fp32.
        experts: [tokens, top_k] int32.
        rows: [tokens * top_k, hidden_size], sorted by expert.
        offsets: [num_experts + 1] int32: where each expert's rows begin.
        index: [tokens * top_k] int32: the row of each slot.
        gated: [tokens * top_k, I].
        outs: [tokens * top_k, hidden_size].
    """

    router_logits: Tensor
    weights: Tensor
    experts: Tensor
    rows: Tensor
    offsets: Tensor
    index: Tensor
    gated: Tensor
    outs: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Views of an arena for one step.

    Attributes:
        hidden: [tokens, hidden_size], the residual stream; layers update it in place.
        normed: [tokens, hidden_size].
        qkv: [tokens, qkv_size]; `q`, `k` and `v` are its heads, [tokens, heads, head_dim].
        attended: [tokens, q_heads, head_dim]; `attended_rows` the same as a matrix.
        gated: [tokens, intermediate_size] of a dense MLP.
        moe: Of a mixture of experts.
        last_rows: [batch] int32: the row of each request's last token.
        last: [batch, hidden_size]: those rows.
        last_normed: [batch, hidden_size].
        logits: [batch, vocab_size].
    """

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    attended: Tensor
    attended_rows: Tensor
    gated: Tensor | None
    moe: MoeBuffers | None
    last_rows: Tensor
    last: Tensor
    last_normed: Tensor
    logits: Tensor


class Arena:
    """Buffers of a decoder for steps of at most so many tokens and requests.

    Steps that may run at the same time need an arena each.

    Args:
        config: The model.
        max_tokens: Tokens of the largest step.
        max_batch: Requests of the largest step. None: `max_tokens`.
        device: Where the memory lies.

    Raises:
        ArgumentError: a count below 1.

    Example:
        >>> from smkern.models import Arena, preset
        >>> Arena(preset("qwen3-8b"), max_tokens=4, device="cpu").buffers(3, 2).qkv.shape
        torch.Size([3, 6144])
    """

    def __init__(
        self,
        config: ModelConfig,
        max_tokens: int,
        max_batch: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        batch = max_tokens if max_batch is None else max_batch
        if max_tokens < 1 or batch < 1:
            raise ArgumentError(
                f"max_tokens={max_tokens}, max_batch={batch}: an arena is for at least one of both"
            )
        self.config = config
        self.max_tokens = max_tokens
        self.max_batch = batch
        self._whole = _allocate(config, max_tokens, batch, torch_device(device))
        self.device = self._whole.hidden.device  # with its index, as tensors say it

    @property
    def num_bytes(self) -> int:
        whole, moe = self._whole, self._whole.moe
        owned = [whole.hidden, whole.normed, whole.qkv, whole.attended, whole.gated,
                 whole.last_rows, whole.last, whole.last_normed, whole.logits]  # fmt: skip
        if moe is not None:
            owned += [getattr(moe, name) for name in MoeBuffers.__dataclass_fields__]
        return sum(x.nbytes for x in owned if x is not None)

    def buffers(self, num_tokens: int, batch: int) -> Buffers:
        """Views for a step of so many tokens and requests.

        Raises:
            ArgumentError: more than the arena is for.
        """
        if not 0 <= num_tokens <= self.max_tokens or not 0 <= batch <= self.max_batch:
            raise ArgumentError(
                f"a step of {num_tokens} tokens and {batch} requests in an arena for "
                f"{self.max_tokens} and {self.max_batch}: split the step, or make a larger arena"
            )
        return _slice(self._whole, self.config, num_tokens, batch)


def _allocate(config: ModelConfig, tokens: int, batch: int, device: torch.device) -> Buffers:
    hidden_size, moe = config.hidden_size, None

    def make(*shape: int, dtype: torch.dtype = config.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    if config.moe is not None:
        experts, top_k, width = (
            config.moe.num_experts, config.moe.top_k, config.moe.intermediate_size
        )  # fmt: skip
        slots = tokens * top_k
        moe = MoeBuffers(
            router_logits=make(tokens, experts),
            weights=make(tokens, top_k, dtype=torch.float32),
            experts=make(tokens, top_k, dtype=torch.int32),
            rows=make(slots, hidden_size),
            offsets=make(experts + 1, dtype=torch.int32),
            index=make(slots, dtype=torch.int32),
            gated=make(slots, width),
            outs=make(slots, hidden_size),
        )
    qkv = make(tokens, config.qkv_size)
    attended = make(tokens, config.num_q_heads, config.head_dim)
    return Buffers(
        hidden=make(tokens, hidden_size),
        normed=make(tokens, hidden_size),
        qkv=qkv,
        q=qkv, k=qkv, v=qkv,
        attended=attended,
        attended_rows=attended,
        gated=make(tokens, config.intermediate_size) if moe is None else None,
        moe=moe,
        last_rows=make(batch, dtype=torch.int32),
        last=make(batch, hidden_size),
        last_normed=make(batch, hidden_size),
        logits=make(batch, config.vocab_size),
    )  # fmt: skip


def _slice(whole: Buffers, config: ModelConfig, tokens: int, batch: int) -> Buffers:
    moe = None
    if whole.moe is not None and config.moe is not None:
        slots, m = tokens * config.moe.top_k, whole.moe
        moe = MoeBuffers(
            m.router_logits[:tokens], m.weights[:tokens], m.experts[:tokens], m.rows[:slots],
            m.offsets, m.index[:slots], m.gated[:slots], m.outs[:slots],
        )  # fmt: skip
    qkv = whole.qkv[:tokens]
    counts = [config.num_q_heads, config.num_kv_heads, config.num_kv_heads]
    q, k, v = qkv.view(tokens, sum(counts), config.head_dim).split(counts, 1)
    attended = whole.attended[:tokens]
    return Buffers(
        hidden=whole.hidden[:tokens],
        normed=whole.normed[:tokens],
        qkv=qkv,
        q=q, k=k, v=v,
        attended=attended,
        attended_rows=attended.view(tokens, config.q_size),
        gated=None if whole.gated is None else whole.gated[:tokens],
        moe=moe,
        last_rows=whole.last_rows[:batch],
        last=whole.last[:batch],
        last_normed=whole.last_normed[:batch],
        logits=whole.logits[:batch],
    )  # fmt: skip
