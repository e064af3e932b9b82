"""Attention's problem and configuration, and how keys and queries are cut.

The cut depends on a request alone (its own lengths and the model's heads), never on the batch, the
budget or the kernel: that makes a row's bits independent of its neighbours (rule 12).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smkern.device import Budget as Budget

AttentionDtype = Literal["bf16", "fp16"]
CacheDtype = Literal["bf16", "fp16", "fp8"]
AttentionKernel = Literal["cuda", "triton", "cutlass"]

DECODE_MAX_Q = 8
"""Requests of at most so many query tokens take the decode path."""
DECODE_PIECE = 512
"""Keys of a decode piece, at least; pieces start at its multiples from the request's start."""
DECODE_MAX_PIECES = 128
"""A longer context has longer pieces (powers of two), so that at most so many are merged."""
DECODE_MAX_ROWS = 32
"""Packed rows (query tokens x heads of a group) of a decode item; more rows are more items.

Half as many at head_dim 256: their sums would not fit the registers."""
PIECE_COST = 2
"""Fixed cost of a decode piece in tiles of 128 keys: teams share the sum evenly."""
PREFILL_ROWS = 128
"""Packed rows of a prefill item."""
PREFILL_TILE = 128
"""Keys of a prefill step; the visible keys of a row are walked in its multiples."""
PREFILL_PIECE = 8192
"""Keys of a prefill piece, at least."""
PREFILL_MAX_PIECES = 4
PREFILL_ENOUGH_ITEMS = 1024
"""A request with so many (row block, KV head) pairs fills any chip: its keys are not cut."""


@dataclass(frozen=True, slots=True, order=True)
class AttentionShape:
    """Host numbers of an attention step: what paths, grids and buffer sizes come from.

    `max_tokens` bounds the query tokens of the step, `max_total_kv` the sum of the lengths.
    `window` 0 means none; else a query at position i sees keys j with i - window < j.
    """

    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_q_len: int
    max_kv_len: int
    max_tokens: int
    max_total_kv: int
    causal: bool = True
    window: int = 0

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def has_prefill(self) -> bool:
        return self.max_q_len > DECODE_MAX_Q

    @property
    def decode_rows(self) -> int:
        """Packed rows of a decode item: what the longest decode query needs, at most 32 (16).

        Beside prefill one query token's rows, at most 8: most decode requests have one token there.
        """
        if self.has_prefill:
            return min(self.group, 8)
        most = DECODE_MAX_ROWS if self.head_dim <= 128 else DECODE_MAX_ROWS // 2
        return min(min(self.max_q_len, DECODE_MAX_Q) * self.group, most)

    @property
    def max_decode_items(self) -> int:
        """Items that any lengths within the shape can give."""
        rows = min(self.max_q_len, DECODE_MAX_Q) * self.group
        blocks = -(-rows // self.decode_rows)
        pieces = min(
            self.batch * min(-(-self.max_kv_len // DECODE_PIECE), DECODE_MAX_PIECES),
            self.max_total_kv // DECODE_PIECE + self.batch,
        )
        return blocks * max(pieces, self.batch)

    @property
    def max_row_blocks(self) -> int:
        """Prefill row blocks that any lengths within the shape can give."""
        if not self.has_prefill:
            return 0
        requests = min(self.batch, self.max_tokens // (DECODE_MAX_Q + 1))
        return self.max_tokens * self.group // PREFILL_ROWS + requests

    @property
    def max_prefill_items(self) -> int:
        pieces = min(-(-self.max_kv_len // PREFILL_PIECE), PREFILL_MAX_PIECES)
        return self.max_row_blocks * max(pieces, 1)


def decode_piece(kv_len: int) -> int:
    """Keys of a decode piece of a request: 512, doubled until 128 pieces hold `kv_len`."""
    piece = DECODE_PIECE
    while piece * DECODE_MAX_PIECES < kv_len:
        piece *= 2
    return piece


def prefill_piece(q_len: int, kv_len: int, group: int, num_kv_heads: int) -> int:
    """Keys of a prefill piece of a request; at least `kv_len` where its keys are not cut."""
    blocks = -(-q_len * group // PREFILL_ROWS)
    piece = PREFILL_PIECE
    if blocks * num_kv_heads >= PREFILL_ENOUGH_ITEMS:
        return max(piece, kv_len)
    while piece * PREFILL_MAX_PIECES < kv_len:
        piece *= 2
    return piece


@dataclass(frozen=True, slots=True, order=True)
class AttentionProblem:
    """One attention launch: its shape, dtypes, and the options that choose code."""

    shape: AttentionShape
    dtype: AttentionDtype = "bf16"
    cache_dtype: CacheDtype = "bf16"
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True, order=True)
class AttentionConfig:
    """One way to run an attention launch.

    `kernel`: "cuda" (csrc/, direct loads and mma.sync for decode, wgmma for prefill), "triton" (any
    device, any option), "cutlass" (a place kept: not built). `ctas_per_sm` counts only where a mask
    confines. `teams` ("cuda" decode): teams of four warps a CTA. `keys` ("triton"): keys of a step.
    `overlap` ("cuda"): the launch may begin while the kernel before it on the stream still runs,
    where a mask confines both (programmatic dependent launch).
    """

    kernel: AttentionKernel = "cuda"
    ctas_per_sm: int = 1
    teams: int = 4
    keys: int = 32
    num_warps: int = 4
    num_stages: int = 2
    overlap: bool = True
