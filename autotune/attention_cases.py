"""Which attention steps are tuned: models by their heads, batches and lengths that cells stand for.

A cell serves neighbours within two octaves (`smkern.tuning.bucket_table.NEAR`): few cover a range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any

import click

from smkern.measure.attention import AttentionCase, CacheDtype, Kind

DECODE_BATCHES = (1, 8, 64)
DECODE_LENGTHS = (1024, 4096, 32768)
PREFILL_LENGTHS = (512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's heads: 32x8x128 is 32 query and 8 KV heads of 128."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_q_heads}x{self.num_kv_heads}x{self.head_dim}"


MODELS = (Heads(32, 8, 128), Heads(64, 8, 128), Heads(32, 8, 64), Heads(64, 8, 64))
"""Groups of 4 and 8 query heads, head dimensions of 128 and 64."""
QUICK_MODELS = MODELS[:1]
QUICK_STEPS: dict[str, Any] = {"batches": (8,), "lengths": (4096,), "prompts": (512,)}


def parse_heads(text: str) -> tuple[Heads, ...]:
    """`32x8x128,64x8x64` -> Heads; ValueError where a part is none."""
    found = []
    for part in text.split(","):
        sizes = [int(size) if size.isdecimal() else 0 for size in part.split("x")]
        if len(sizes) != 3 or min(sizes) < 1 or sizes[0] % sizes[1]:
            raise ValueError(f"{part!r} is not QxKVxD with Q a multiple of KV: 32x8x128")
        found.append(Heads(*sizes))
    return tuple(found)


def heads_option() -> Callable[[Any], Any]:
    """`--heads` of the command."""

    def parse(ctx: Any, param: Any, value: str | None) -> tuple[Heads, ...] | None:
        try:
            return parse_heads(value) if value else None
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    text = "Attention: models as QxKVxD.  [default: 32x8x128,64x8x128,32x8x64,64x8x64]"
    return click.option("--heads", callback=parse, help=text)


def tuned_cases(
    models: Iterable[Heads] = MODELS,
    *,
    cache_dtype: CacheDtype = "bf16",
    batches: Iterable[int] = DECODE_BATCHES,
    lengths: Iterable[int] = DECODE_LENGTHS,
    prompts: Iterable[int] = PREFILL_LENGTHS,
) -> list[AttentionCase]:
    """Decode steps of every batch and length, and a prompt of every length, of each model."""
    found = []
    for heads in models:
        steps = [(batch, 1, length) for length, batch in product(lengths, batches)]
        steps += [(1, length, length) for length in prompts]
        found += [case_of(heads, *step, cache_dtype) for step in steps]
    return found


def case_of(
    heads: Heads, batch: int, q_len: int, length: int, cache_dtype: CacheDtype = "bf16"
) -> AttentionCase:
    """A decode step, or with more than one query token prompts, of requests of one length."""
    kind: Kind = "decode" if q_len == 1 else "prefill"
    return AttentionCase(
        f"{heads}-{kind}-{batch}x{length}", kind, (q_len,) * batch, (length,) * batch, cache_dtype,
        heads.num_q_heads, heads.num_kv_heads, heads.head_dim,
    )  # fmt: skip
