"""What layers of an engine's step share: where tokens are, and the plans of their attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

import smkern

LENGTHS = 1024
"""The longest context of a step is rounded up to multiples of this, so that few occur."""


class Heads(NamedTuple):
    """What layers have in common that share a plan."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None


@dataclass
class Step:
    """A step, for all layers of a group. Engines may add what is theirs: it has no slots.

    Attributes:
        num_tokens: New tokens; rows behind them are padding.
        page_table: [requests, pages] int32.
        kv_lens: [requests] int32, new tokens included; 0 for requests that are padding.
        cu_q_lens: [requests + 1] int32; None: one token each.
        max_q_len: Bound of a request's new tokens.
        plans: By what layers have in common.
        max_kv_len: Bound of a request's keys.
    """

    num_tokens: int
    page_table: Tensor
    kv_lens: Tensor
    cu_q_lens: Tensor | None
    max_q_len: int
    plans: dict[Heads, smkern.Plan]
    max_kv_len: int = 0

    def plan(
        self, kinds: Iterable[Heads], page_size: int, out: Mapping[Heads, smkern.Plan] | None = None
    ) -> None:
        """Make the plans for the current stream's SMs, anew in place where there are some."""
        for heads in kinds:
            self.plans[heads] = smkern.plan_attention(
                self.kv_lens,
                num_q_heads=heads.num_q_heads,
                num_kv_heads=heads.num_kv_heads,
                head_dim=heads.head_dim,
                page_size=page_size,
                cu_q_lens=self.cu_q_lens,
                max_q_len=self.max_q_len,
                max_kv_len=self.max_kv_len,
                window=heads.window,
                num_tokens=self.num_tokens,
                out=None if out is None else out[heads],
            )


def rounded_length(length: int, most: int) -> int:
    """A bound of contexts' lengths, one of few."""
    return min(-(-int(length) // LENGTHS) * LENGTHS, most)
