"""What layers of a step share: where tokens are, and the plans of their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

import smkern

LENGTHS = 1024
"""The longest context of other steps is rounded up to multiples of this, so that few occur."""


class Heads(NamedTuple):
    """What layers have in common that share a plan."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass(slots=True)
class SmkernMetadata:
    """A step, for all layers of a group.

    Attributes:
        num_tokens: New tokens; rows behind them are padding.
        page_table: [requests, blocks] int32.
        kv_lens: [requests] int32, new tokens included; 0 for requests that are padding.
        cu_q_lens: [requests + 1] int32; None: one token each.
        max_q_len: Bound of a request's new tokens.
        plans: By what layers have in common.
    """

    num_tokens: int
    page_table: Tensor
    kv_lens: Tensor
    cu_q_lens: Tensor | None
    max_q_len: int
    plans: dict[Heads, smkern.Plan]


class SmkernMetadataBuilder(AttentionMetadataBuilder[SmkernMetadata]):  # type: ignore[misc]
    """Makes the plans of a step.

    A graph keeps the addresses of its plans: those of a capture are kept by their sizes, and made
    anew in place for each replay, outside the graph. Their longest context is the model's, since a
    plan's host numbers must be those of the capture. Other steps get plans of their own.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._page_size = int(kv_cache_spec.block_size)
        self._max_context = int(vllm_config.model_config.max_model_len)
        layers = vllm_config.compilation_config.static_forward_context
        impls = [layers[name].impl for name in layer_names]
        self._heads = tuple(dict.fromkeys(impl.heads for impl in impls))
        self._kept: dict[tuple[Heads, int, int, int], smkern.Plan] = {}
        if device.type == "cuda":
            self._warm(impls, vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> SmkernMetadata:
        """The step's metadata; a launch for each plan, and no wait for the device."""
        return self._build(common_attn_metadata, is_capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> SmkernMetadata:
        """As `build`, with plans that are kept."""
        return self._build(common_attn_metadata, is_capture=True)

    def _build(self, step: Any, *, is_capture: bool) -> SmkernMetadata:
        tokens, longest = int(step.num_actual_tokens), int(step.max_query_len)
        batch = int(step.num_reqs)
        cu_q_lens = step.query_start_loc[: batch + 1] if tokens != batch or longest != 1 else None
        kv_lens = step.seq_lens[:batch]
        plans = {}
        for heads in self._heads:
            key = (heads, batch, longest, tokens)
            kept = self._kept.get(key)
            is_kept = is_capture or kept is not None
            plans[heads] = smkern.plan_attention(
                kv_lens,
                num_q_heads=heads.num_q_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                page_size=self._page_size,
                cu_q_lens=cu_q_lens,
                max_q_len=longest,
                max_kv_len=self._max_context if is_kept else self._rounded(step.max_seq_len),
                window=heads.window,
                num_tokens=tokens,
                out=kept,
            )
            if is_capture:
                self._kept[key] = plans[heads]
        return SmkernMetadata(
            tokens, step.block_table_tensor[:batch], kv_lens, cu_q_lens, longest, plans
        )

    def _rounded(self, length: int) -> int:
        return min(-(-int(length) // LENGTHS) * LENGTHS, self._max_context)

    def _warm(self, impls: list[Any], vllm_config: Any) -> None:
        """Compile and load all that steps may launch: a capture must find it there."""
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        calls: list[Any] = []
        for impl in {impl.heads: impl for impl in impls}.values():
            calls += impl.calls(self._page_size, most, vllm_config.model_config.dtype)
        # a worker is often a daemon, which may have no children
        smkern.warmup(calls=calls, workers=1, progress=False)
