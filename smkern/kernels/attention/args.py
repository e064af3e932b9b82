"""Arguments of an attention launch: addresses and strides, the same for every kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from smkern.kernels.attention.items import PlanLayout
from smkern.tuning.attention.shapes import PREFILL_ROWS, AttentionShape
from smkern.tuning.config import Dtype

ALIGNMENT = 256
NUM_ADDRESSES = 12
"""Number of addresses in `AttentionArguments`, which come first."""

Launch = Callable[..., None]
"""launch(stream, *addresses): the addresses of `AttentionArguments` in its order.

The inputs of a plan may follow them; a launch that is given a plan ignores those. Last may come the
address of the output's scales.
"""
Bind = Callable[[tuple[Any, ...]], Launch]
"""bind(sizes): the launch for calls with these `AttentionArguments.sizes`."""


class AttentionArguments(NamedTuple):
    """Device addresses (0: absent) and sizes of one launch; strides are in elements.

    q and out are [num_tokens, q_heads, head_dim], lse fp32 [num_tokens, q_heads] contiguous. Caches
    are [num_pages, page_size, kv_heads, head_dim] with the strides given and inner stride 1. The
    page table is [batch, table_len] int32 with rows `table_stride` apart, or flat [table_len] with
    `page_indptr` [batch + 1]. `sinks` fp32 [q_heads]. Cache scales multiply: `k_scale` by the fp32
    at `k_scale_ptr` where that is given. `plan` and `workspace` are a plan's two buffers. Scales of
    an output in e4m3, whose address a launch gets as `out_scale`, are `scale_steps` apart by token
    and by 128 columns.
    """

    q: int
    k: int
    v: int
    out: int
    lse: int
    page_table: int
    page_indptr: int
    sinks: int
    k_scale_ptr: int
    v_scale_ptr: int
    plan: int
    workspace: int
    q_strides: tuple[int, int]
    out_strides: tuple[int, int]
    k_strides: tuple[int, int, int]
    v_strides: tuple[int, int, int]
    table_stride: int
    table_len: int
    num_pages: int
    num_tokens: int
    scale: float
    softcap: float
    k_scale: float
    v_scale: float
    scale_steps: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, addresses: Iterable[int], sizes: Iterable[Any]) -> AttentionArguments:
        """The arguments for these addresses and sizes."""
        return cls._make((*addresses, *sizes))

    @property
    def addresses(self) -> tuple[Any, ...]:
        return self[:NUM_ADDRESSES]

    @property
    def sizes(self) -> tuple[Any, ...]:
        """All fields after the addresses, to which a launch is bound."""
        return self[NUM_ADDRESSES:]


@dataclass(frozen=True, slots=True)
class WorkspaceLayout:
    """Byte offsets in a plan's workspace: arrival counters (int32), then partials (fp32).

    The counter of (row block c, KV head h) is c * kv_heads + h. The decode partial of (slot s, KV
    head h) has index s * kv_heads + h and is [decode_rows, head_dim] fp32; the (max, sum) pairs of
    all decode partials, [decode_rows, 2] fp32 each, follow. Prefill has the same layout with 128
    rows. Partials are not normalised: sum_j exp2(s_j - max) v_j, and as sum sum_j exp2(s_j - max),
    with s in log2 units and without `v_scale`; max is -inf and sum 0 where no key was seen.
    """

    counters: int
    decode_out: int
    decode_stats: int
    prefill_out: int
    prefill_stats: int
    num_bytes: int

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, shape: AttentionShape) -> WorkspaceLayout:
        """The layout of a shape."""
        layout, heads, dim = PlanLayout.of(shape), shape.num_kv_heads, shape.head_dim
        ends = [0]
        for size in (
            4 * layout.num_counters * heads,
            4 * layout.decode_slots * heads * shape.decode_rows * dim,
            4 * layout.decode_slots * heads * shape.decode_rows * 2,
            4 * layout.prefill_slots * heads * PREFILL_ROWS * dim,
            4 * layout.prefill_slots * heads * PREFILL_ROWS * 2,
        ):
            ends.append(ends[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return cls(*ends)


class MergeProblem(NamedTuple):
    """A merge of `states` states of `rows` (token, head) pairs; `aligned` to 16 bytes."""

    states: int
    rows: int
    head_dim: int
    dtype: Dtype
    aligned: bool
