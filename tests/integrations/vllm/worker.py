"""One attention layer behind vLLM's calls, stubs' or the package's own: blocks, steps, all keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SCALES = 0.5, 1.0
"""Of keys and values in an fp8 cache."""


@dataclass
class Worker:
    """Steps of some requests, beside attention over all of a request's keys in fp64.

    Attributes:
        backend: The module with `SmkernBackend`.
        block: Tokens of a block.
        context: Tokens of a request, at most.
        blocks: Of the cache; requests hold some anywhere in it, never the first.
        requests: How many there can be.
        order: How a cache's dimensions lie in memory, outermost first; empty: as the backend says.
    """

    backend: Any
    num_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    cache_dtype: str = "auto"
    block: int = 16
    context: int = 256
    blocks: int = 80
    requests: int = 4
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    order: tuple[int, ...] = ()
    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = torch.Generator(self.device).manual_seed(self.seed)
        self.impl = self.backend.SmkernImpl(
            self.num_heads, self.head_dim, self.head_dim**-0.5, self.kv_heads, None, self.window,
            self.cache_dtype, self.softcap, sinks=self.sinks, use_alibi_sqrt=False,
            chunk_lookback=-1,
        )  # fmt: skip
        self.impl.process_weights_after_loading(torch.bfloat16)
        k_scale, v_scale = (torch.tensor(x, device=self.device) for x in SCALES)
        self.layer = SimpleNamespace(impl=self.impl, _k_scale=k_scale, _v_scale=v_scale)
        self.builder = self.backend.SmkernMetadataBuilder(
            SimpleNamespace(block_size=self.block), ["layer"],
            config({"layer": self.layer}, self.context, self.dtype), torch.device(self.device),
        )  # fmt: skip
        self.cache = self._poisoned()
        each = -(-self.context // self.block)
        found = torch.randperm(self.blocks - 1, generator=self.draw, device=self.device) + 1
        self.table = found[: each * self.requests].view(self.requests, each).int()

    def _poisoned(self) -> Tensor:
        found = self.backend.SmkernBackend
        shape = found.get_kv_cache_shape(self.blocks, self.block, self.kv_heads, self.head_dim)
        order = self.order or found.get_kv_cache_stride_order()
        size = [shape[i] for i in order]
        lying = torch.full(size, float("nan"), dtype=self.dtype, device=self.device)
        if self.impl.is_fp8:
            lying = lying.to(torch.float8_e4m3fn).view(torch.uint8)
        cache = lying.permute([order.index(i) for i in range(4)])
        assert cache.shape == shape
        return cache

    def step(
        self, new: dict[int, int], *, rows: int = 0, pad: int = 0, capture: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Some new tokens of some requests; what came out, and what should have.

        Args:
            new: Tokens by request.
            rows: Rows of padding behind the tokens.
            pad: Requests of padding, as full graphs have them.
            capture: Whether the metadata is that of a capture.
        """
        tokens, longest = sum(new.values()), max(new.values())
        qkv = [self._rand(tokens + rows, n) for n in (self.num_heads, self.kv_heads, self.kv_heads)]
        starts, lens, expected = [0], [], []
        for request, count in new.items():
            part = slice(starts[-1], starts[-1] + count)
            starts.append(starts[-1] + count)
            old = self.seen.get(request, (qkv[1][:0], qkv[2][:0]))
            k, v = (torch.cat([x, y[part]]) for x, y in zip(old, qkv[1:], strict=True))
            self.seen[request] = k, v
            lens.append(len(k))
            expected.append(self._truth(qkv[0][part], k, v))
        table = torch.cat([self.table[[*new]], self.table[:0].new_zeros(pad, self.table.shape[1])])
        common = self._common(
            starts + [starts[-1]] * pad, lens + [0] * pad, tokens + pad * longest, longest, table
        )
        build = self.builder.build_for_cudagraph_capture if capture else self.builder.build
        metadata = build(common) if capture else build(0, common)
        out = torch.full_like(qkv[0], float("nan"))
        made = self.impl.forward(self.layer, *qkv, self.cache, metadata, out)
        assert made.data_ptr() == out.data_ptr()
        self.metadata = metadata
        return out[:tokens], torch.cat(expected)

    def dummy(self, rows: int, *, capture: bool = False) -> Any:
        """What a rank with nothing to run is given: tables as steps left them, and no slots."""
        common = self._common([*range(rows + 1)], [1] * rows, rows, 1, self.table[:rows])
        common.slot_mapping.fill_(-1)
        build = self.builder.build_for_cudagraph_capture if capture else self.builder.build
        metadata = build(common) if capture else build(0, common)
        qkv = [self._rand(rows, n) for n in (self.num_heads, self.kv_heads, self.kv_heads)]
        self.impl.forward(self.layer, *qkv, self.cache, metadata, torch.empty_like(qkv[0]))
        return metadata

    def _common(
        self, starts: list[int], lens: list[int], tokens: int, longest: int, table: Tensor
    ) -> Any:
        made = import_module("vllm.v1.attention.backend").CommonAttentionMetadata
        cu_q_lens = torch.tensor(starts).int()
        slots = torch.full((tokens,), -1, device=self.device)
        for pages, start, end, keys in zip(table, starts, starts[1:], lens, strict=False):
            at = torch.arange(keys - (end - start), keys, device=self.device)
            slots[start:end] = pages[at // self.block] * self.block + at % self.block
        return made(
            query_start_loc=cu_q_lens.to(self.device), query_start_loc_cpu=cu_q_lens,
            seq_lens=torch.tensor(lens, device=self.device).int(), num_reqs=len(lens),
            num_actual_tokens=tokens, max_query_len=longest, max_seq_len=max(lens),
            block_table_tensor=table, slot_mapping=slots,
        )  # fmt: skip

    def _rand(self, tokens: int, heads: int) -> Tensor:
        size = tokens, heads, self.head_dim
        return torch.randn(size, generator=self.draw, device=self.device).to(self.dtype)

    def _truth(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of a request's last tokens over all of its keys."""
        if self.impl.is_fp8:
            k, v = (
                (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
                for x, scale in zip((k, v), SCALES, strict=True)
            )
        q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(self.num_heads // self.kv_heads, 0) for x in (k, v))
        tokens, keys = q.shape[1], k.shape[1]
        scores = self.impl.scale * q @ k.transpose(1, 2)
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        at = torch.arange(keys, device=self.device)
        behind = at[keys - tokens :, None] - at
        is_hidden = (behind < 0) | (behind >= (self.window or keys))
        scores = scores.masked_fill(is_hidden, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.to(scores)[:, None, None].expand(-1, tokens, 1)
            scores = torch.cat([scores, sinks], -1)
        return (scores.softmax(-1)[..., :keys] @ v).transpose(0, 1).float()


def config(layers: dict[str, Any], context: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What a builder reads of vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=context, dtype=dtype),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=context),
    )
