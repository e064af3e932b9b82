"""How many SM cycles the last wave of a kernel's thread blocks leaves idle."""

from __future__ import annotations

from math import ceil

from smkern.errors import ArgumentError


def idle_ratio(thread_blocks: int, num_sms: int, *, blocks_per_sm: int = 1) -> float:
    """Share of SM cycles that are idle because thread blocks do not fill the last wave.

        w = ceil(g / (b N)), tail = ceil(g/b - N (w-1)), idle = (N - tail) / (N w)

    Args:
        thread_blocks: Thread blocks of the kernel, g.
        num_sms: SMs, N.
        blocks_per_sm: Thread blocks that an SM holds at a time, b.

    Returns:
        From 0 to below 1.

    Raises:
        ArgumentError: a count is below 1.

    Source: Bullet section 2.2.1.

    Example:
        >>> round(idle_ratio(128, 108), 3)      # a product of 8 x 16 tiles on an A100
        0.407
    """
    if min(thread_blocks, num_sms, blocks_per_sm) < 1:
        raise ArgumentError(
            f"thread_blocks={thread_blocks}, num_sms={num_sms}, blocks_per_sm={blocks_per_sm}: "
            "each is 1 or more"
        )
    waves = -(-thread_blocks // (blocks_per_sm * num_sms))
    tail = ceil(thread_blocks / blocks_per_sm - num_sms * (waves - 1))
    return (num_sms - tail) / (num_sms * waves)
