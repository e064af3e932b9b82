"""A step of vLLM's as its layers see it, and what makes it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

import smkern
from smkern.integrations.plans import Heads, Step, rounded_length
from smkern.integrations.vllm import refuse


class SmkernMetadataBuilder(AttentionMetadataBuilder[Step]):  # type: ignore[misc]
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
        self._kept: dict[tuple[int, int, int], dict[Heads, smkern.Plan]] = {}
        if device.type == "cuda":
            self._warm(impls, vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Step:
        """The step's metadata; a launch for each plan, and no wait for the device."""
        return self._build(common_attn_metadata, is_capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Step:
        """As `build`, with plans that are kept."""
        return self._build(common_attn_metadata, is_capture=True)

    def _build(self, step: Any, *, is_capture: bool) -> Step:
        refuse(step.causal is not True, "attention that is not causal", "FLASH_ATTN")
        refuse(step.rswa_prefix_lens is not None, "a window with a prefix", "TRITON_ATTN")
        images = step.mm_req_doc_ranges is not None
        refuse(images, "images' tokens seen from both sides", "TRITON_ATTN")
        tokens, longest = int(step.num_actual_tokens), int(step.max_query_len)
        batch = int(step.num_reqs)
        cu_q_lens = step.query_start_loc[: batch + 1] if tokens != batch or longest != 1 else None
        made = Step(
            tokens, step.block_table_tensor[:batch], step.seq_lens[:batch], cu_q_lens, longest, {},
            rounded_length(step.max_seq_len, self._max_context),
        )  # fmt: skip
        key = (batch, longest, tokens)
        kept = self._kept.get(key)
        if is_capture or kept is not None:
            made.max_kv_len = self._max_context
        made.plan(self._heads, self._page_size, kept)
        if is_capture:
            self._kept[key] = made.plans
        return made

    def _warm(self, impls: list[Any], vllm_config: Any) -> None:
        """Compile and load all that steps may launch: a capture must find it there."""
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        calls: list[Any] = []
        for impl in {impl.heads: impl for impl in impls}.values():
            calls += impl.calls(self._page_size, most, vllm_config.model_config.dtype)
        # a worker is often a daemon, which may have no children
        smkern.warmup(calls=calls, workers=1, progress=False)
