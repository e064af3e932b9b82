"""What the attention suite measures: lengths, dtypes, and the bytes and FLOPs that count."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from smkern.bench.named import Group, named
from smkern.bench.operands import MIN_TOTAL_BYTES

Kind = Literal["decode", "prefill", "mixed"]
CacheDtype = Literal["bf16", "fp8"]

BUDGETS = (16, 24, 32, 48, 64, 84, 100, 116, 132)
QUICK_BUDGETS = (16, 132)
SKEWED_LENGTHS = (200, 500, 1000, 2000, 8000, 30000)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One attention step over a paged cache, causal.

    `q_lens` and `kv_lens` are the requests' new tokens and lengths, new tokens included. Decode
    requests come first in a mixed case.
    """

    name: str
    kind: Kind
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    cache_dtype: CacheDtype = "bf16"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(self.q_lens)

    @property
    def cu_q_lens(self) -> tuple[int, ...]:
        starts = [0]
        for q_len in self.q_lens:
            starts.append(starts[-1] + q_len)
        return tuple(starts)

    @property
    def num_decode(self) -> int:
        """Leading requests of one query token."""
        return next((i for i, q_len in enumerate(self.q_lens) if q_len > 1), self.batch)

    @property
    def is_dense(self) -> bool:
        """Equal requests with nothing cached: what an operator without pages can compute."""
        return (
            self.kind == "prefill" and len(set(self.kv_lens)) == 1 and self.q_lens == self.kv_lens
        )

    @property
    def bytes_moved(self) -> int:
        """K and V of all keys once, q once, the output once."""
        element_bytes = 1 if self.cache_dtype == "fp8" else 2
        kv = 2 * sum(self.kv_lens) * self.num_kv_heads * self.head_dim * element_bytes
        return kv + 2 * 2 * self.num_tokens * self.num_q_heads * self.head_dim

    @property
    def flops(self) -> int:
        """Two products over every visible (query, key) pair."""
        pairs = sum(
            q * kv - q * (q - 1) // 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True)
        )
        return 4 * self.head_dim * self.num_q_heads * pairs

    @property
    def num_sets(self) -> int:
        """Caches to rotate over, so that a launch finds nothing of its own in L2; at most 16."""
        return min(16, max(1, -(-MIN_TOTAL_BYTES // self.bytes_moved)))

    @property
    def about(self) -> dict[str, Any]:
        """The `case` of a results cell; the same for every provider."""
        return {
            "kind": self.kind,
            "name": self.name,
            "batch": self.batch,
            "tokens": self.num_tokens,
            "kv_tokens": sum(self.kv_lens),
            "q_heads": self.num_q_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "dtype": "bf16",
            "cache_dtype": self.cache_dtype,
        }


def decode(name: str, kv_lens: Sequence[int]) -> AttentionCase:
    return AttentionCase(name, "decode", (1,) * len(kv_lens), tuple(kv_lens))


def prefill(name: str, q_lens: Sequence[int], kv_lens: Sequence[int]) -> AttentionCase:
    return AttentionCase(name, "prefill", tuple(q_lens), tuple(kv_lens))


def skewed_lengths(batch: int, seed: int = 0) -> tuple[int, ...]:
    """`batch` lengths drawn from `SKEWED_LENGTHS`, the same ones every time."""
    chosen = random.Random(seed)
    return tuple(chosen.choice(SKEWED_LENGTHS) for _ in range(batch))


UNIFORM = decode("decode-64x4096", (4096,) * 64)
SKEWED = decode("decode-skewed", skewed_lengths(32))
LONG = decode("decode-4x128k", (131072,) * 4)
COLD = decode("decode-8x1024", (1024,) * 8)
UNIFORM_FP8 = replace(UNIFORM, name="decode-64x4096-fp8", cache_dtype="fp8")
ONE_PROMPT = prefill("prefill-1x8192", (8192,), (8192,))
FOUR_PROMPTS = prefill("prefill-4x2048", (2048,) * 4, (2048,) * 4)
SHORT_PROMPTS = prefill("prefill-16x512", (512,) * 16, (512,) * 16)
CACHED_PROMPT = prefill("prefill-2048-on-30k", (2048,), (2048 + 30000,))
MIXED = AttentionCase(
    "mixed-64x2048+2048-on-6k", "mixed", (1,) * 64 + (2048,), (2048,) * 64 + (2048 + 6000,)
)

CASES = (
    UNIFORM,
    SKEWED,
    LONG,
    COLD,
    UNIFORM_FP8,
    ONE_PROMPT,
    FOUR_PROMPTS,
    SHORT_PROMPTS,
    CACHED_PROMPT,
    MIXED,
)
QUICK_CASES = (UNIFORM, COLD, ONE_PROMPT)


AttentionGroup = Group[AttentionCase]


def cases_named(names: Iterable[str]) -> tuple[AttentionCase, ...]:
    """The suite's cases by parts of their names; ValueError for a name that no case has."""
    return named(CASES, names)
