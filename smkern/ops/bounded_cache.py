"""What a process keeps by a call's numbers, never without a bound, and what one answer serves."""

from __future__ import annotations

from typing import Any

from smkern.errors import ArgumentError

MAX_CACHED = 1 << 11
"""Plans, selections and records kept, of each; a plan holds about 4 KiB, so 8 MiB at most. Prompts
of any length in any budget have tens of thousands of sizes, and few come again."""

MAX_CHOICES = 1 << 17
"""Choices of whole steps kept, of an operator, up to 0.5 KiB each: a warmup makes a few hundred for
each weight in each budget, which take the host 0.6 to 1 ms each and are not to be made again."""


def model_rows(m: int) -> int:
    """The rows that a model is asked about in place of `m`: the next step at or above.

    Steps are 16 rows up to 512 and 64 above, no more than the narrowest tile there, so the count
    of tiles is that of `m`; every power of two is one, so the bucket of a table is too. A few
    hundred steps cover all M: warmup can visit every choice, and most prompts find theirs made.
    """
    if m <= 16:
        return 1 << (m - 1).bit_length() if m > 1 else 1
    step = 16 if m <= 512 else 64
    return -(-m // step) * step


def steps_to(max_m: int) -> list[int]:
    """Every step of `model_rows` up to the one that serves `max_m`."""
    steps, m = [], 1
    while m <= model_rows(max_m):
        steps.append(model_rows(m))
        m = steps[-1] + 1
    return steps


def librarys_rows(max_m: int) -> list[int]:
    """The M at which cuBLASLt is launched before it serves: it picks a kernel by M itself, and one
    that is new waits until the device has done all that is on its way, which took 50 to 60 ms.

    Up to 512, where prompts' last rows and tokens lie, each; above every step, as rows of prompts
    are padded.
    """
    return sorted({*range(1, min(max_m, 512) + 1), *steps_to(max_m)})


def keep(kept: dict[Any, Any], key: Any, value: Any, most: int | None = None) -> None:
    """Keep `value` under `key`; a full dictionary lets the older half go before.

    Args:
        kept: The dictionary.
        key, value: What is kept.
        most: Entries, at most; None: `MAX_CACHED`.

    Raises:
        ArgumentError: something in the key cannot be one.
    """
    most = MAX_CACHED if most is None else most
    if len(kept) >= most:
        for old in list(kept)[: most // 2]:
            kept.pop(old, None)
    try:
        kept[key] = value
    except TypeError:
        raise ArgumentError("an argument has a type that no option has") from None
