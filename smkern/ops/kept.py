"""What a process keeps by a call's numbers: plans, selections, records; never without a bound."""

from __future__ import annotations

from typing import Any

from smkern.errors import ArgumentError

MAX_CACHED = 1 << 15
"""Plans, selections and records kept, of each; a plan holds about 4 KiB, so 128 MiB at most."""


def keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep `value` under `key`; a full dictionary is emptied before.

    Raises:
        ArgumentError: something in the key cannot be one.
    """
    if len(kept) >= MAX_CACHED:
        kept.clear()
    try:
        kept[key] = value
    except TypeError:
        raise ArgumentError("an argument has a type that no option has") from None
