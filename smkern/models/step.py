"""The batch of one forward: its tokens, where their keys and values go, and its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from smkern.device import Budget
from smkern.errors import ArgumentError
from smkern.models.activations import ActivationBuffers, QuantizedRows, StepBuffers
from smkern.models.config import ModelConfig
from smkern.models.plan_memory import PlanMemory
from smkern.ops.attention import Plan, plan_attention
from smkern.ops.attention.plan import PlanNumbers, shape_of_plan
from smkern.partition import current_num_sms

Caches = Sequence[tuple[Tensor, Tensor]]
"""(k_cache, v_cache) of each layer, each [pages, page_size, kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The batch of one forward; made by `Step.make`.

    Attributes:
        config: The model.
        token_ids: [tokens] int32 or int64.
        kv_lens: [batch] int32: keys of each request, new tokens included.
        page_table: [batch, max_pages] int32.
        caches: (k_cache, v_cache) of each layer.
        cu_q_lens: [batch + 1] int32, or None: one token per request.
        max_q_len: New tokens of a request, at most.
        max_kv_len: Keys of a request, at most.
        max_total_kv: Keys of all requests, at most; None: batch * max_kv_len.
        activations: The buffers.
        buffers: Views of them.
        plan: Attention's plan; `planned` makes it.
        num_sms: SMs of every operator. None: all of the current stream's partition.
    """

    config: ModelConfig
    token_ids: Tensor
    kv_lens: Tensor
    page_table: Tensor
    caches: Caches
    cu_q_lens: Tensor | None
    max_q_len: int
    max_kv_len: int
    max_total_kv: int | None
    activations: ActivationBuffers
    buffers: StepBuffers
    plan: Plan | None = None
    num_sms: int | None = None

    @classmethod
    def make(
        cls,
        activations: ActivationBuffers,
        *,
        token_ids: Tensor,
        kv_lens: Tensor,
        page_table: Tensor,
        caches: Caches,
        max_kv_len: int,
        cu_q_lens: Tensor | None = None,
        max_q_len: int = 1,
        max_total_kv: int | None = None,
        num_sms: int | None = None,
    ) -> Step:
        """A step in activation buffers; nothing is launched, and no length is read.

        With `cu_q_lens` it is a prefill or a mixed step: the requests' tokens follow one another,
        and `kv_lens` counts cached and new tokens, so chunks and cached prefixes need nothing
        else. Without it each request has one token.

        Args:
            activations: Hold the step until another step is made in them.
            token_ids: [tokens] int32 or int64.
            kv_lens: [batch] int32.
            page_table: [batch, max_pages] int32, any row stride.
            caches: (k_cache, v_cache) of each layer.
            max_kv_len: Upper bound of `kv_lens`, known to the host; at most the model's context.
            cu_q_lens: [batch + 1] int32.
            max_q_len: Upper bound of a request's new tokens, known to the host.
            max_total_kv: Upper bound of the sum of `kv_lens`, known to the host; where batch *
                max_kv_len is far above it, the plan gets smaller.
            num_sms: SMs of every operator.

        Raises:
            ArgumentError: what does not fit the buffers, the model or the caches.

        Example:
            >>> import torch
            >>> from smkern.models import ActivationBuffers, Decoder, Step, Weights, preset
            >>> config = preset("qwen3-8b").replace(
            ...     num_layers=1, hidden_size=64, num_q_heads=2, num_kv_heads=1,
            ...     intermediate_size=96, vocab_size=32, dtype=torch.float32, max_position=64)
            >>> decoder = Decoder(config, Weights.random(config))
            >>> caches = [tuple(torch.zeros(2, 4, 16, 1, 128))]
            >>> step = Step.make(ActivationBuffers(config, 5), token_ids=torch.arange(5),
            ...                  kv_lens=torch.tensor([3, 2]).int(), caches=caches,
            ...                  max_q_len=3, max_kv_len=16,
            ...                  cu_q_lens=torch.tensor([0, 3, 5]).int(),
            ...                  page_table=torch.tensor([[1], [2]]).int())
            >>> decoder.forward(step).shape
            torch.Size([2, 32])
        """
        config = activations.config
        if token_ids.dim() != 1 or kv_lens.dim() != 1:
            raise ArgumentError(
                f"token_ids has shape {list(token_ids.shape)}, kv_lens {list(kv_lens.shape)}: pass "
                "vectors, [tokens] and [batch]"
            )
        tokens, batch = token_ids.shape[0], kv_lens.shape[0]
        if cu_q_lens is None and tokens != batch:
            raise ArgumentError(
                f"{tokens} tokens for {batch} requests: without cu_q_lens each has one; pass it"
            )
        if len(caches) != config.num_layers:
            raise ArgumentError(
                f"{len(caches)} pairs of caches for {config.num_layers} layers: pass one a layer"
            )
        if max_kv_len > config.max_position:
            raise ArgumentError(
                f"max_kv_len={max_kv_len}: the model's context has {config.max_position} tokens; "
                "shorten the prompts"
            )
        for name, x in (("token_ids", token_ids), ("kv_lens", kv_lens)):
            if x.device != activations.device:
                raise ArgumentError(
                    f"{name} is on {x.device}, the activations on {activations.device}: move it "
                    "there"
                )
        return cls(
            config, token_ids, kv_lens, page_table, caches, cu_q_lens, max_q_len, max_kv_len,
            max_total_kv, activations, activations.buffers(tokens, batch), num_sms=num_sms,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def batch(self) -> int:
        return self.kv_lens.shape[0]

    def planned(self, out: Plan | None = None, *, num_sms: int | None = None) -> Step:
        """This step with attention's plan, made on the device for the current stream's budget.

        Args:
            out: A plan for a step of the same sizes, to be overwritten.
            num_sms: SMs of the plan, where it is for another stream than this one. None: the
                step's `num_sms`.
        """
        plan = plan_attention(
            self.kv_lens,
            cu_q_lens=self.cu_q_lens,
            out=out,
            num_sms=self.num_sms if num_sms is None else num_sms,
            **self._numbers()._asdict(),
        )
        return replace(self, plan=plan)

    def planned_in(self, memory: PlanMemory, num_sms: int | None = None) -> Step:
        """As `planned`, in memory that exists already; on a CPU in new memory.

        Args:
            memory: Shared by steps that never run at the same time.
            num_sms: SMs of the plan. None: the step's, else those of the current stream.
        """
        if self.kv_lens.device.type == "cpu":
            return self.planned()
        if num_sms is None:
            num_sms = self.num_sms or current_num_sms(self.kv_lens.device.index)
        shape = shape_of_plan(self.kv_lens, self.cu_q_lens, self._numbers())
        return self.planned(memory.plan(shape, Budget(num_sms)), num_sms=num_sms)

    def _numbers(self) -> PlanNumbers:
        return PlanNumbers(
            num_q_heads=self.config.num_q_heads,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            page_size=self.caches[0][0].shape[1],
            max_q_len=self.max_q_len,
            max_kv_len=self.max_kv_len,
            causal=True,
            window=None,
            num_tokens=None if self.cu_q_lens is None else self.num_tokens,
            max_total_kv=self.max_total_kv,
        )

    def last_rows(self) -> Tensor | None:
        """[batch] int32: each request's last row, computed on the device; None: every row is."""
        if self.cu_q_lens is None:
            return None
        return torch.sub(self.cu_q_lens[1:], 1, out=self.buffers.last_rows)

    def ends(self) -> StepBuffers:
        """Buffers of what follows attention for a row a request: `last` and `last_attended` are
        what is read of the residual stream and of the heads.

        There are some rows more, of nobody: a number of rows that comes for the first time takes
        a GPU's host 3 ms.

        Raises:
            ArgumentError: more requests than the buffers hold tokens.
        """
        whole = self.activations
        rows = max(batch_bucket(self.batch, min(whole.max_batch, whole.max_tokens)), self.batch)
        b = whole.buffers(rows, rows)
        fp8 = b.fp8
        if b.last_attended_scale is not None:
            fp8 = fp8._replace(attended=QuantizedRows(b.last_attended, b.last_attended_scale))
        return replace(b, hidden=b.last, attended_rows=b.last_attended, fp8=fp8)


def batch_bucket(batch: int, max_batch: int) -> int:
    """The rows that serve a batch of requests with a row each: 1, 2, 4, 8, 16, then every 16.

    At most a third of the rows of a batch above 32 is padding.
    """
    rounded = 1 << (batch - 1).bit_length() if batch <= 16 else -(-batch // 16) * 16
    return min(rounded, max_batch)


def batch_buckets(max_batch: int) -> list[int]:
    """The rows of all batches of at most so many requests."""
    return sorted({batch_bucket(batch, max_batch) for batch in range(1, max_batch + 1)})
