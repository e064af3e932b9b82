"""The operator calls of a decoder, for `smkern.warmup`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from smkern.errors import ArgumentError
from smkern.limits import FP8_BLOCK
from smkern.models.batch_invariant import check_batch_invariant
from smkern.models.config import ModelConfig
from smkern.models.quantization import Quantization
from smkern.models.shard import Shard
from smkern.ops import (
    AppendCalls,
    AttentionCalls,
    Fp8Calls,
    MoeCalls,
    RowsCalls,
    SampleCalls,
    SwigluCalls,
    checks,
)
from smkern.ops.gemm.warmup import GemmCalls, epilogue_from
from smkern.ops.operator_warmup import joined
from smkern.ops.warming import Target, Warmable, Work


@dataclass(frozen=True, slots=True)
class ModelCalls:
    """The operator calls of a decoder, for `smkern.warmup`, whatever batch and lengths.

    After warming them up, no forward of the model, eager or captured, compiles or loads in these
    budgets.

    Args:
        config: The model; its dtype is bf16 or fp16.
        page_size: Tokens of a page.
        max_tokens: Tokens of the largest step.
        max_batch: Requests of the largest step, rows of the head.
        max_q_len: New tokens of a request, at most.
        batch_invariant: The decoder's mode.
        cache_dtype: Dtype of the KV pool. None: the model's.
        tp: GPUs that share the model; the calls are of one's part.

    Raises:
        ArgumentError: numbers or a dtype that cannot be.
        ConfigError: `batch_invariant` of a mixture of experts, or sizes that so many GPUs cannot
            share.

    Example:
        >>> import smkern
        >>> from smkern.models import ModelCalls, preset
        >>> calls = ModelCalls(preset("qwen3-8b"), page_size=16, max_tokens=8192)
        >>> smkern.warmup(calls=[calls], budgets=[32, 100])  # doctest: +SKIP
    """

    config: ModelConfig
    page_size: int = 16
    max_tokens: int = 8192
    max_batch: int = 256
    max_q_len: int = 8192
    batch_invariant: bool = False
    cache_dtype: torch.dtype | None = None
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_batch", "max_q_len"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)}: give at least 1")
        if self.batch_invariant:
            check_batch_invariant(self.config)
        list(self.calls())

    def calls(self) -> Iterator[Warmable]:
        """The calls of each family; attention's kernels compile longest and are begun first."""
        config, dtype = Shard(0, self.tp).config(self.config), self.config.dtype
        heads = (config.num_q_heads, config.num_kv_heads, config.head_dim, self.page_size)
        cache = None if self.cache_dtype is dtype else self.cache_dtype
        yield AttentionCalls(
            *heads, max_q_len=self.max_q_len, dtype=dtype, cache_dtype=cache,
            out_scale=config.attends_in_e4m3,
        )  # fmt: skip
        yield AppendCalls(
            *heads, rotary_dim=config.rope.rotary_dim, norm=config.qk_norm, dtype=dtype,
            cache_dtype=cache,
        )  # fmt: skip
        hidden = [config.hidden_size]
        added = [] if self.tp == 1 else hidden
        yield RowsCalls(hidden=hidden, added=added, embedded=_copied(config), dtype=dtype)
        yield SampleCalls(config.vocab_size, [dtype])
        if config.moe is not None:
            moe = config.moe
            yield MoeCalls(
                config.hidden_size, moe.intermediate_size, moe.num_experts, moe.top_k,
                renormalize=moe.renormalize, dtype=dtype, residual=self.tp == 1,
            )  # fmt: skip
        yield from self._products(config)

    def _products(self, config: ModelConfig) -> Iterator[Warmable]:
        tokens = self.max_tokens
        # Of several GPUs each has a part of a sum, to which the residual is added afterwards.
        added_by = "residual" if self.tp == 1 else "none"
        hidden, width = config.hidden_size, config.intermediate_size
        kinds, same = [checks.dtype_name(config.dtype)], [self.batch_invariant]

        def products(shapes: list[tuple[int, int]], max_m: int, epilogue: str) -> GemmCalls:
            return GemmCalls(shapes, max_m, kinds, [epilogue_from(epilogue)], same)

        yield products([(config.vocab_size // self.tp, hidden)], self.max_batch, "none")
        if config.moe is not None:
            yield products([(config.moe.num_experts, hidden)], tokens, "none")
        if config.quantization is not None:
            yield from _fp8_calls(config, config.quantization, tokens, same, added_by)
            return
        added = [(hidden, config.q_size)]
        if config.moe is None:
            added.append((hidden, width))
            yield SwigluCalls([(width, hidden)], tokens, [config.dtype], same)
        yield products([(config.qkv_size, hidden)], tokens, _of_qkv(config))
        yield products(added, tokens, added_by)

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        return joined([calls.work(target) for calls in self.calls()])


def _copied(config: ModelConfig) -> list[int]:
    """Widths of the rows that are copied: embeddings, and each request's last row of the residual
    stream and of what its heads read, of which pairs of e4m3 and halves of scales are copied."""
    attended = [config.q_size]
    if config.attends_in_e4m3:
        attended = [config.q_size // 2, 2 * config.q_size // FP8_BLOCK]
    return sorted({config.hidden_size, *attended})


def _of_qkv(config: ModelConfig) -> str:
    return "bias" if config.qkv_bias else "none"


def _fp8_calls(
    config: ModelConfig, given: Quantization, max_tokens: int, same: list[bool], added_by: str
) -> Iterator[Warmable]:
    """What a quantized model calls in place of products and norms in its dtype."""
    hidden, moe, static = config.hidden_size, config.moe, given.activations == "static"
    calls = partial(
        Fp8Calls, blocks=given.kind == "fp8-block", max_m=max_tokens, batch_invariant=same,
        dtype=config.dtype,
    )  # fmt: skip
    plain, added = [(config.qkv_size, hidden)], [(hidden, config.q_size)]
    widths, norms = [] if config.attends_in_e4m3 else [config.q_size], [hidden]
    if moe is not None:
        inner, experts = moe.intermediate_size, moe.num_experts
        yield calls(experts=[(experts, inner, hidden, True), (experts, hidden, inner, False)])
        widths += [hidden, inner]
    elif static:
        widths.append(config.intermediate_size)
        yield calls(swiglu=[(config.intermediate_size, hidden)])
        yield RowsCalls(gated=[config.intermediate_size], dtype=config.dtype)
    else:
        yield calls(quantized_swiglu=[(config.intermediate_size, hidden)])
    if moe is None:
        added.append((hidden, config.intermediate_size))
    yield calls(shapes=plain, epilogues=[_of_qkv(config)])
    yield calls(shapes=added, epilogues=[added_by])
    if added_by == "none":  # the norm behind a sum over GPUs is in the model's dtype
        widths += norms
    if static:
        yield calls(static=sorted({*widths, *norms}))
    else:
        yield calls(quantized=sorted(set(widths)), hidden=norms)
