"""The append's part of a warmup: every kernel of a model's appends, launched once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from smkern.ops.annotated import check_fields
from smkern.ops.append.call import Call
from smkern.ops.append.operators import APPEND, APPEND_KV
from smkern.ops.checks import check_head_counts, check_page_size
from smkern.ops.operator import Operator
from smkern.ops.operator_check import check_operator
from smkern.ops.operator_warmup import work_of_calls
from smkern.ops.warming import Target, Work, room


@dataclass(frozen=True, slots=True)
class AppendCalls:
    """Appends to come, for `smkern.warmup`: what a model fixes; tokens, batch and lengths are free.

    Args:
        num_q_heads: Query heads; 0 for `smkern.append_kv`.
        num_kv_heads: KV heads; those of this device under tensor parallelism.
        head_dim: 64, 96, 128 or 256.
        page_size: Tokens of a page.
        rotary_dim: Dimensions that turn; 0: calls have no `cos_sin`.
        interleaved: As in `smkern.qk_norm_rope_append`.
        norm: Whether calls have `q_norm` and `k_norm`.
        dtype: Dtype of q, k and v: torch.bfloat16 or torch.float16.
        cache_dtype: None (dtype's) or torch.float8_e4m3fn.
        table_dtype: Dtype of `cos_sin`.
        weight_dtype: Dtype of the norms' weights. None: `dtype`.
        ragged: Whether calls have `cu_q_lens`: False, True or both.
        flat: Whether calls have `page_indptr`: False, True or both.

    Raises:
        ArgumentError: numbers or dtypes that cannot be.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    rotary_dim: int = 0
    interleaved: bool = False
    norm: bool = False
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    table_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    ragged: Sequence[bool] = (False, True)
    flat: Sequence[bool] = (False,)

    def __post_init__(self) -> None:
        check_fields(self)
        check_page_size(self.page_size)
        check_head_counts(self.num_q_heads or self.num_kv_heads, self.num_kv_heads, self.head_dim)
        for op, call in self.calls(torch.device("meta"), True):
            check_operator(op, call)
            op.problem(call, True)

    def calls(self, device: torch.device, aligned: bool) -> list[tuple[Operator[Any], Call]]:
        """A call of each kind that appends one token of one request, on tensors of its own."""
        op = APPEND if self.num_q_heads else APPEND_KV
        kinds = product(self.ragged, self.flat)
        return [(op, self._call(device, aligned, *kind)) for kind in kinds]

    def _call(self, device: torch.device, aligned: bool, ragged: bool, flat: bool) -> Call:
        dim, count = self.head_dim, self.num_q_heads
        heads = count + 2 * self.num_kv_heads
        qkv = room((1, heads, dim), self.dtype, aligned, device)
        q, k, v = qkv.split([count, self.num_kv_heads, self.num_kv_heads], 1)
        pages = (2, 1, self.page_size, self.num_kv_heads, dim)
        caches = torch.empty(pages, dtype=self.cache_dtype or self.dtype, device=device)
        table = torch.zeros((1,) if flat else (1, 1), dtype=torch.int32, device=device)
        lens = torch.ones(1, dtype=torch.int32, device=device)
        starts = torch.arange(2, dtype=torch.int32, device=device)
        cos_sin, weights = None, None
        if self.rotary_dim:
            cos_sin = torch.zeros(1, self.rotary_dim, dtype=self.table_dtype, device=device)
        if self.norm:
            weights = torch.zeros(dim, dtype=self.weight_dtype or self.dtype, device=device)
        return Call(
            q if count else None, k, v, caches[0], caches[1], table, lens, cos_sin,
            self.interleaved, weights, weights, page_indptr=starts if flat else None,
            cu_q_lens=starts if ragged else None,
        )  # fmt: skip

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        return work_of_calls(self.calls, target)
