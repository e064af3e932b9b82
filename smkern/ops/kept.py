"""What a process keeps by a call's numbers: plans, selections, records; never without a bound."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smkern.errors import ArgumentError

MAX_CACHED = 1 << 11
"""Plans, selections and records kept, of each; a plan holds about 4 KiB, so 8 MiB at most. Prompts
of any length in any budget have tens of thousands of sizes, and few come again."""


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


def kind(x: Any) -> Any:
    """What a record depends on of an optional tensor; a number stands for itself."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.get_device()
    return x
