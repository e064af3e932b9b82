"""A ladder of SM partitions: work stays inside each, and a switch costs microseconds (needs a GPU).

`python examples/partitions.py`
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from rich.console import Console

import smkern
from smkern.errors import DeviceError

SWITCHES = 1000


def show(console: Console, decodes: Sequence[int] = (16, 32, 64)) -> None:
    """Make a ladder, verify both sides of some of its splits, and time a switch."""
    start = perf_counter()
    with smkern.ladder() as ladder:
        console.print(
            f"A ladder of {len(ladder.rungs)} splits in {1e3 * (perf_counter() - start):.0f} ms."
        )
        for decode in decodes:
            split = ladder.split(decode=decode)
            for side in (split.decode, split.prefill):
                side.verify()
            console.print(
                f"  decode {split.decode.num_sms:3} SMs, prefill {split.prefill.num_sms:3} SMs: "
                "every CTA stayed inside, eagerly and replayed from a graph"
            )
        console.print(f"  a switch between two partitions: {switch_us(ladder):.1f} us of host time")


def switch_us(ladder: smkern.Ladder) -> float:
    """Host time to make another partition's stream current, microseconds."""
    first, *_, last = (ladder.split(decode=rung).decode for rung in ladder.rungs)
    start = perf_counter()
    for _ in range(SWITCHES // 2):
        with first:
            pass
        with last:
            pass
    return 1e6 * (perf_counter() - start) / SWITCHES


if __name__ == "__main__":
    try:
        show(Console())
    except DeviceError as error:
        raise SystemExit(f"this example needs a GPU: {error}") from None
