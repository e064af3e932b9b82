"""A step of vLLM's as its layers see it, and what makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

import smkern
from smkern.integrations.plans import Step, rounded_length
from smkern.integrations.vllm import refuse


@dataclass(kw_only=True)
class VllmStep(Step):
    """A step whose keys and values go to vLLM's slots, which may be other than the tables say.

    A slot of -1 is not written: of padding, of drafts behind the longest context, and of the steps
    of ranks with nothing to run, whose tables may name blocks that others have by then.

    Attributes:
        pages: [tokens, 1] int32: each token's page; -1: it has none.
        page_lens: [tokens] int32: its place there, from 1 on.
    """

    pages: Tensor
    page_lens: Tensor


class SmkernMetadataBuilder(AttentionMetadataBuilder[VllmStep]):  # type: ignore[misc]
    """Makes the plans of a step, and says where its keys and values go.

    A graph keeps the addresses of both: those of a capture are kept by their sizes, and made anew
    in place for each replay, outside the graph. Their longest context is the model's, since a
    plan's host numbers must be those of the capture. Other steps get their own.
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
        self._kept: dict[tuple[int, int, int], VllmStep] = {}
        if device.type == "cuda":
            self._warm(impls, vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> VllmStep:
        """The step's metadata; three launches, one for each plan, and no wait for the device."""
        return self._build(common_attn_metadata, is_capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> VllmStep:
        """As `build`, of what is kept."""
        return self._build(common_attn_metadata, is_capture=True)

    def _build(self, step: Any, *, is_capture: bool) -> VllmStep:
        refuse(step.causal is not True, "attention that is not causal", "FLASH_ATTN")
        refuse(step.rswa_prefix_lens is not None, "a window with a prefix", "TRITON_ATTN")
        images = step.mm_req_doc_ranges is not None
        refuse(images, "images' tokens seen from both sides", "TRITON_ATTN")
        tokens, longest = int(step.num_actual_tokens), int(step.max_query_len)
        batch = int(step.num_reqs)
        cu_q_lens = step.query_start_loc[: batch + 1] if tokens != batch or longest != 1 else None
        key = (batch, longest, tokens)
        kept = self._kept.get(key)
        pages, page_lens = self._places(step.slot_mapping[:tokens], kept)
        made = VllmStep(
            tokens, step.block_table_tensor[:batch], step.seq_lens[:batch], cu_q_lens, longest, {},
            rounded_length(step.max_seq_len, self._max_context), pages=pages, page_lens=page_lens,
        )  # fmt: skip
        if is_capture or kept is not None:
            made.max_kv_len = self._max_context
        made.plan(self._heads, self._page_size, None if kept is None else kept.plans)
        if is_capture:
            self._kept[key] = made
        return made

    def _places(self, slots: Tensor, kept: VllmStep | None) -> tuple[Tensor, Tensor]:
        """Each slot's page and place: a token is a request of one page, for `smkern.append_kv`."""
        if kept is None:
            pages = torch.empty_like(slots, dtype=torch.int32)[:, None]
            page_lens = torch.empty_like(slots, dtype=torch.int32)
        else:
            pages, page_lens = kept.pages, kept.page_lens
        torch.floor_divide(slots[:, None], self._page_size, out=pages)
        torch.remainder(slots, self._page_size, out=page_lens).add_(1)
        return pages, page_lens

    def _warm(self, impls: list[Any], vllm_config: Any) -> None:
        """Compile and load all that steps may launch: a capture must find it there."""
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        dtype = vllm_config.model_config.dtype
        calls = dict.fromkeys(x for impl in impls for x in impl.calls(self._page_size, most, dtype))
        # a worker is often a daemon, which may have no children
        smkern.warmup(calls=[*calls], workers=1, progress=False)
