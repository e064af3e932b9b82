"""smkern's attention as a backend of vLLM 0.26 to 0.33; imported by vLLM when it is asked for."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import vllm
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

import smkern
from smkern.integrations.plans import Heads
from smkern.integrations.vllm import check_version, refuse
from smkern.integrations.vllm.metadata import SmkernMetadataBuilder, VllmStep
from smkern.limits import HEAD_DIMS
from smkern.tuning.attention.constraints import CUDA_CAPABILITY

check_version(vllm.__version__)

FP8 = ("fp8", "fp8_e4m3")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
BLOCKS = (16, 32, 64, 128, 256)
ORDERS = {
    ("NHD", False): (0, 2, 1, 3),
    ("NHD", True): (1, 0, 3, 2, 4),
    ("HND", False): (0, 1, 2, 3),
    ("HND", True): (1, 2, 0, 3, 4),
}
"""How [blocks, kv_heads, block, 2 * head_dim] lies in memory, without layers and with."""


class SmkernBackend(AttentionBackend):  # type: ignore[misc]
    """What of vLLM's options is served, and the classes that do it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [*DTYPES.values()]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *DTYPES, *FP8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SmkernImpl]:
        return SmkernImpl

    @staticmethod
    def get_builder_cls() -> type[SmkernMetadataBuilder]:
        return SmkernMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [*BLOCKS]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return block_size is None or any(block_size % size == 0 for size in BLOCKS)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [*HEAD_DIMS]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """K and V of a head side by side, as vLLM's own backends have them.

        0.29 and later do not ask, and lay out caches of that shape as they like: all strides serve.
        """
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """As above."""
        from vllm.v1.attention.backends.utils import get_kv_cache_layout  # gone in 0.29

        return ORDERS[get_kv_cache_layout(), include_num_layers_dimension]

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Whether a row's bits depend on its request alone: Triton's kernel is another matter."""
        return bool(current_platform.is_device_capability(CUDA_CAPABILITY))

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Drafts that are trimmed on the device alone: not tried."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """What else vLLM says of a model that it refuses to start with this backend."""
        if use_mla or use_sparse or head_size not in HEAD_DIMS:
            return (
                "smkern's attention serves neither MLA nor sparse attention, and head sizes "
                f"{', '.join(map(str, HEAD_DIMS))}: leave attention_backend=CUSTOM out"
            )
        if kv_cache_dtype in DTYPES and DTYPES[kv_cache_dtype] is not dtype:
            return (
                f"kv_cache_dtype={kv_cache_dtype} beside {dtype}: smkern's attention keeps keys "
                "and values in the model's dtype or fp8; set kv_cache_dtype=auto"
            )
        return None

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) >= (8, 0)


class SmkernImpl(AttentionImpl):  # type: ignore[misc]
    """The attention of one layer.

    Raises:
        ConfigError: an option that is not served, with the one that avoids it.
    """

    supports_dcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        refuse(alibi_slopes is not None, "ALiBi slopes", "FLASH_ATTN")
        refuse(attn_type != AttentionType.DECODER, f"attn_type={attn_type}", "FLASH_ATTN")
        refuse(head_size not in HEAD_DIMS, f"head_size={head_size}", "FLASH_ATTN")
        for name, value in others.items():  # each has a value that asks for nothing
            refuse(value not in (None, False, -1), f"{name}={value!r}", "TRITON_ATTN")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.softcap = logits_soft_cap or None
        self._given_sinks = self.sinks = sinks
        self.is_fp8 = kv_cache_dtype in FP8
        self._caches: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        self.heads = Heads(num_heads, self.num_kv_heads, head_size, sliding_window)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks have their values now, or others: scores are fp32, where graphs read them."""
        if self._given_sinks is None or self.sinks is None:
            return
        if self.sinks is self._given_sinks:
            self.sinks = torch.empty_like(self._given_sinks, dtype=torch.float32)
        self.sinks.copy_(self._given_sinks.detach())

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: VllmStep | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the new keys and values, then attend.

        Args:
            layer: Has the scales of an fp8 cache.
            query: [rows, q_heads, head_dim]; rows behind the step's tokens are padding.
            key: [rows, kv_heads, head_dim].
            value: As key.
            kv_cache: [blocks, kv_heads, block, 2 * head_dim], any strides between its rows.
            attn_metadata: The step; None: a run that only counts memory.
            output: [rows, q_heads, head_dim], written.
            output_scale, output_block_scale: Not served.
        """
        refuse(output_scale is not None, "an output scale", "TRITON_ATTN")
        refuse(output_block_scale is not None, "an output block scale", "FLASH_ATTN")
        if attn_metadata is None:
            return output.zero_()
        step, tokens = attn_metadata, attn_metadata.num_tokens
        k_cache, v_cache = self._views(kv_cache)
        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale} if self.is_fp8 else {}
        if self.kv_sharing_target_layer_name is None:
            smkern.append_kv(
                key[:tokens], value[:tokens], k_cache, v_cache, step.pages, step.page_lens, **scales
            )
        smkern.paged_attention(
            query[:tokens], k_cache, v_cache, step.page_table, step.kv_lens,
            cu_q_lens=step.cu_q_lens, max_q_len=step.max_q_len, scale=self.scale,
            window=self.heads.window, softcap=self.softcap, sinks=self.sinks,
            plan=step.plans[self.heads], out=output[:tokens], **scales,
        )  # fmt: skip
        return output

    def _views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of a layer's cache; views are kept, since making them takes host time a layer."""
        given, k_cache, v_cache = self._caches
        if given is not kv_cache or k_cache is None or v_cache is None:
            both = kv_cache
            if self.is_fp8 and both.dtype is not torch.float8_e4m3fn:
                both = both.view(torch.float8_e4m3fn)
            k_cache, v_cache = both.transpose(1, 2).split(self.head_size, -1)
            self._caches = kv_cache, k_cache, v_cache
        return k_cache, v_cache

    def calls(self, page_size: int, max_q_len: int, dtype: torch.dtype) -> list[Any]:
        """What a warm-up compiles for this layer."""
        cache_dtype = torch.float8_e4m3fn if self.is_fp8 else None
        attention = smkern.AttentionCalls(
            self.num_heads, self.num_kv_heads, self.head_size, page_size, max_q_len=max_q_len,
            window=self.heads.window, softcap=self.softcap is not None,
            sinks=self.sinks is not None, dtype=dtype, cache_dtype=cache_dtype,
        )  # fmt: skip
        append = smkern.AppendCalls(
            0, self.num_kv_heads, self.head_size, page_size, dtype=dtype, cache_dtype=cache_dtype,
            ragged=(False,),
        )  # fmt: skip
        return [attention, append]
