"""What the append suite measures: tokens, what happens to them, and the bytes that count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from smkern.bench.named import Group, named
from smkern.bench.operands import MIN_TOTAL_BYTES

Kind = Literal["plain", "rope", "norm-rope", "fp8"]

KINDS: tuple[Kind, ...] = ("plain", "norm-rope", "fp8")
TOKENS = (8, 64, 512, 2048, 8192)
BUDGETS = (16, 32, 64, 84, 100, 116, 132)
QUICK_BUDGETS = (16, 132)
PREFIX = 64
"""Keys that each request has before."""


@dataclass(frozen=True, slots=True)
class AppendCase:
    """The append of one step: a token a request (decode) or requests of up to 2,048 (prefill).

    "plain" is K and V alone; "rope" turns q and k, "norm-rope" norms them before; "fp8" that, into
    an fp8 cache. `rotary_dim`: dimensions that turn; 0: all.
    """

    kind: Kind
    tokens: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    rotary_dim: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.tokens}"

    @property
    def is_decode(self) -> bool:
        return self.tokens <= 64

    @property
    def q_lens(self) -> tuple[int, ...]:
        if self.is_decode:
            return (1,) * self.tokens
        longest = min(self.tokens, 2048)
        return (longest,) * (self.tokens // longest)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(PREFIX + q_len for q_len in self.q_lens)

    @property
    def turns(self) -> bool:
        return self.kind != "plain"

    @property
    def norms(self) -> bool:
        return self.kind in ("norm-rope", "fp8")

    @property
    def cache_dtype(self) -> Literal["bf16", "fp8"]:
        return "fp8" if self.kind == "fp8" else "bf16"

    @property
    def bytes_moved(self) -> int:
        """q, k and v read and written once, and a token's cosines and sines in fp32."""
        written = 1 if self.kind == "fp8" else 2
        head = self.tokens * self.head_dim
        kv = 2 * head * self.num_kv_heads * (2 + written)
        return kv + (head * self.num_q_heads * 4 + head * 4 if self.turns else 0)

    @property
    def flops(self) -> int:
        """None that count."""
        return 0

    @property
    def num_sets(self) -> int:
        """Operands to rotate over, so that a launch finds little of its own in L2; at most 64."""
        return min(64, max(2, -(-MIN_TOTAL_BYTES // self.bytes_moved)))

    @property
    def about(self) -> dict[str, Any]:
        """The `case` of a results cell; the same for every provider."""
        return {
            "kind": self.kind,
            "name": self.name,
            "batch": len(self.q_lens),
            "tokens": self.tokens,
            "q_heads": self.num_q_heads if self.turns else 0,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "dtype": "bf16",
            "cache_dtype": self.cache_dtype,
        }

    @property
    def op(self) -> str:
        return "qk_norm_rope_append" if self.turns else "append_kv"


CASES = tuple(AppendCase(kind, tokens) for kind in KINDS for tokens in TOKENS)
QUICK_CASES = tuple(case for case in CASES if case.tokens in (64, 8192))


AppendGroup = Group[AppendCase]


def cases_named(names: Iterable[str]) -> tuple[AppendCase, ...]:
    """The suite's cases by parts of their names; ValueError for a name that no case has."""
    return named(CASES, names)
