"""Attention's problem and configuration, and how keys and queries are cut.

The cut depends on the request only (its lengths and the model's heads), never on the batch, the
budget or the kernel, which makes a row's bits independent of its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smkern.device import Budget as Budget

AttentionDtype = Literal["bf16", "fp16"]
CacheDtype = Literal["bf16", "fp16", "fp8"]
AttentionKernel = Literal["cuda", "triton", "cutlass"]

DECODE_MAX_Q = 8
"""Requests with at most this many query tokens are brief: they take the decode path."""
DECODE_MAX_GROUP = 16
"""More query heads on a KV head have no decode path: the matrix unit's tiles of 64 rows read their
keys faster than teams of warps do, 16 rows at a time (of 64 heads 4.2 times on 16 SMs, of 16 heads
0.63). All requests of a model take one path, so that bits do not depend on how many tokens are
verified at once."""
DECODE_PIECE = 512
"""Minimum keys of a decode piece; pieces start at multiples of it from the request's start."""
DECODE_LONG = 3072
"""Requests with more keys have pieces of twice as many, as the end of one costs what 60 keys do.

At 64 x 4,096 that gains 4 to 6% on 16 to 32 SMs, with an fp8 cache 13%. A request alone takes
longer from 24 SMs on: of 3,073 keys 19 to 23%, of 4,096 9 to 19%, of 6,000 up to 7, of 8,192 3."""
DECODE_REST = 4
"""A rest of at most this part of a piece (a quarter) joins a request's last whole piece.

A piece costs two tiles of 128 keys beside its keys, so that 2,049 keys as 5 pieces would cost an
eighth more than 2,048; as 4 they cost a 24th more."""
DECODE_MAX_PIECES = 128
"""The most pieces merged for a request: longer contexts have longer pieces (powers of two)."""
MERGED_AT_ONCE, BUNDLE = 16, 8
"""A decode row block of more pieces merges each bundle of 8 into one partial, and then those.

One team merges what is merged at once: of 128 pieces with 16 rows that was half the time of a
request of 131,072 keys alone."""
DECODE_MAX_ROWS = 16
"""Packed rows (query tokens x heads of a group) of a decode item; further rows make more items.

Half as many at head_dim 256: queries and sums of more do not fit the registers, nor the sums of
two teams an SM's shared memory. Items of 32 rows took twice as long as two of 16."""
PIECE_COST = 2
"""Fixed cost of a decode piece in tiles of 128 keys; teams share the total cost evenly."""
PREFILL_ROWS = 128
"""Packed rows of a prefill item."""
PREFILL_TILE = 128
"""Keys of a prefill step; a row's visible keys are walked in multiples of it."""
PREFILL_PIECE = 8192
"""Minimum keys of a prefill piece."""
PREFILL_MAX_PIECES = 4
BRIEF_PIECE, BRIEF_MAX_PIECES = 1024, 32
"""The same of brief requests without a decode path, of which a step may have few."""
PREFILL_ENOUGH_ITEMS = 1024
"""A request with this many (row block, KV head) pairs fills any GPU, so its keys are not cut."""


@dataclass(frozen=True, slots=True, order=True)
class AttentionShape:
    """Host numbers of an attention step, which decide its path, grid and buffer sizes.

    `max_tokens` bounds the query tokens of the step, `max_total_kv` the sum of the lengths.
    `window` 0 means none; otherwise a query at position i sees keys j with i - window < j.
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
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def has_decode(self) -> bool:
        """Whether brief requests take the decode path."""
        return self.group <= DECODE_MAX_GROUP

    def decodes(self, q_len: int) -> bool:
        """Whether a request with so many query tokens takes the decode path."""
        return q_len <= DECODE_MAX_Q and self.has_decode

    @property
    def has_prefill(self) -> bool:
        return not self.decodes(self.max_q_len)

    @property
    def decode_rows(self) -> int:
        """Packed rows of a decode item: as many as the longest decode query needs, at most 16 (8).

        Beside prefill one query token's rows, at most 8: decode requests mostly have one token.
        """
        if self.has_prefill:
            return min(self.group, 8)
        most = DECODE_MAX_ROWS if self.head_dim <= 128 else DECODE_MAX_ROWS // 2
        return min(min(self.max_q_len, DECODE_MAX_Q) * self.group, most)

    @property
    def max_decode_items(self) -> int:
        """Upper bound of decode items for any lengths within the shape."""
        if not self.has_decode:
            return 0
        rows = min(self.max_q_len, DECODE_MAX_Q) * self.group
        blocks = -(-rows // self.decode_rows)
        pieces = min(
            self.batch * min(-(-self.max_kv_len // DECODE_PIECE), DECODE_MAX_PIECES),
            self.max_total_kv // DECODE_PIECE + self.batch,
        )
        return blocks * max(pieces, self.batch)

    @property
    def max_row_blocks(self) -> int:
        """Upper bound of prefill row blocks for any lengths within the shape."""
        if not self.has_prefill:
            return 0
        least = DECODE_MAX_Q + 1 if self.has_decode else 1
        requests = min(self.batch, self.max_tokens // least)
        return self.max_tokens * self.group // PREFILL_ROWS + requests

    @property
    def cuts_prefill(self) -> bool:
        """Whether a prefill request within the shape can have several pieces."""
        return self.max_kv_len > (PREFILL_PIECE if self.has_decode else BRIEF_PIECE)

    @property
    def max_prefill_items(self) -> int:
        pieces = min(-(-self.max_kv_len // PREFILL_PIECE), PREFILL_MAX_PIECES)
        items = self.max_row_blocks * max(pieces, 1)
        if self.has_decode:
            return items
        # of brief requests, beside the others
        most = min(-(-self.max_kv_len // BRIEF_PIECE), BRIEF_MAX_PIECES)
        pieces = min(self.batch * most, self.max_total_kv // BRIEF_PIECE + self.batch)
        blocks = -(-min(self.max_q_len, DECODE_MAX_Q) * self.group // PREFILL_ROWS)
        brief = blocks * max(pieces, self.batch)
        return brief if self.max_q_len <= DECODE_MAX_Q else items + brief


def decode_cut(kv_len: int) -> tuple[int, int]:
    """(keys per decode piece, index of the last piece) of a request.

    A piece has 512 keys, above 3,072 keys 1,024, doubled until 128 pieces hold `kv_len`; the last
    one has the rest of the keys: up to a quarter of a piece beside its own, or only these where
    there are more.
    """
    piece = DECODE_PIECE if kv_len <= DECODE_LONG else 2 * DECODE_PIECE
    while piece * DECODE_MAX_PIECES < kv_len:
        piece *= 2
    return piece, max(kv_len - piece // DECODE_REST - 1, 0) // piece


def bundles_of(pieces: int) -> int:
    """Bundles in which a decode row block's pieces are merged first; 0: all are merged at once."""
    return -(-pieces // BUNDLE) if pieces > MERGED_AT_ONCE else 0


def prefill_piece(q_len: int, kv_len: int, group: int, num_kv_heads: int) -> int:
    """Keys per prefill piece of a request; at least `kv_len` if its keys are not cut."""
    blocks = -(-q_len * group // PREFILL_ROWS)
    piece, most = PREFILL_PIECE, PREFILL_MAX_PIECES
    if q_len <= DECODE_MAX_Q:
        piece, most = BRIEF_PIECE, BRIEF_MAX_PIECES
    if blocks * num_kv_heads >= PREFILL_ENOUGH_ITEMS:
        return max(PREFILL_PIECE, kv_len)
    while piece * most < kv_len:
        piece *= 2
    return piece


@dataclass(frozen=True, slots=True, order=True)
class AttentionProblem:
    """One attention launch: shape, dtypes, and the options that select compiled code."""

    shape: AttentionShape
    dtype: AttentionDtype = "bf16"
    cache_dtype: CacheDtype = "bf16"
    softcap: bool = False
    sinks: bool = False
    scaled: bool = False
    """Output in e4m3 with a scale for 128 columns of a token."""


@dataclass(frozen=True, slots=True, order=True)
class AttentionConfig:
    """One way to run an attention launch.

    `kernel`: "cuda" (csrc/, direct loads and mma.sync for decode, wgmma for prefill), "triton" (any
    device, any option), "cutlass" (reserved, not built). `ctas_per_sm` applies under a mask only.
    `teams` ("cuda" decode): teams of four warps per CTA. `keys` ("triton"): keys per step.
    `overlap` ("cuda"): the launch may begin while the previous kernel on the stream still runs,
    where a mask confines both (programmatic dependent launch).
    """

    kernel: AttentionKernel = "cuda"
    ctas_per_sm: int = 1
    teams: int = 4
    keys: int = 32
    num_warps: int = 4
    num_stages: int = 2
    overlap: bool = True
