"""The cases of the attention suite."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from smkern.measure.attention import AttentionCase

SKEWED_LENGTHS = (200, 500, 1000, 2000, 8000, 30000)


def decode(name: str, kv_lens: Sequence[int]) -> AttentionCase:
    return AttentionCase(name, "decode", (1,) * len(kv_lens), tuple(kv_lens))


def prefill(name: str, q_lens: Sequence[int], kv_lens: Sequence[int]) -> AttentionCase:
    return AttentionCase(name, "prefill", tuple(q_lens), tuple(kv_lens))


def skewed_lengths(batch: int) -> tuple[int, ...]:
    """`batch` lengths drawn from `SKEWED_LENGTHS`, the same ones every time."""
    chosen = random.Random(0)
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
