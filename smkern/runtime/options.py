"""Whether what a runtime is made of can be what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smkern.errors import ArgumentError
from smkern.limits import as_flag, as_int, shown
from smkern.models.sampling import MAX_SEED
from smkern.runtime.step_log import StepLog
from smkern.runtime.timeline.timeline import Timeline


def check_options(
    timeline: Any, log: Any, tokenizer: Any, seed: Any, flags: Mapping[str, Any]
) -> int:
    """Raise ArgumentError for an option that is of another kind; the seed.

    Args:
        timeline, log: None, or what they are called.
        tokenizer: None, or with `encode` and `decode`.
        seed: A whole number.
        flags: True or False each.
    """
    for name, value in flags.items():
        as_flag(name, value)
    parts = {"timeline": (timeline, Timeline), "log": (log, StepLog)}
    for name, (value, wanted) in parts.items():
        if value is not None and not isinstance(value, wanted):
            raise ArgumentError(f"{name}={shown(value)}: pass a {wanted.__name__}, or None")
    if tokenizer is not None and not _is_tokenizer(tokenizer):
        raise ArgumentError(
            f"tokenizer={shown(tokenizer)} of type {type(tokenizer).__name__}: pass an object with "
            "encode(text) and decode(token_ids), or None"
        )
    return as_int("seed", seed, -MAX_SEED, MAX_SEED)


def device_of(executor: Any) -> Any:
    """The device of an executor; ArgumentError for what is none."""
    if not hasattr(executor, "device"):
        raise ArgumentError(
            f"executor={shown(executor)}: pass a ModelExecutor or a SimExecutor; smkern.serve "
            "makes one of a model and a pool"
        )
    return executor.device


_LAYERED = ("config", "device", "max_position", "representative_layers", "embed", "layer", "head")
PARTS = {
    "model": _LAYERED,
    "pool": ("sizes", "device", "layer", "allocate"),
    "device": ("launch", "wait", "now_us", "synchronize", "partition", "rungs"),
}
"""What an executor asks of what it is made of."""


def check_parts(**parts: Any) -> None:
    """Raise ArgumentError for a part that lacks what `PARTS` says; None is left."""
    for name, part in parts.items():
        try:
            lacking = [wanted for wanted in PARTS[name] if not hasattr(part, wanted)]
        except Exception:  # noqa: BLE001  of whatever it is
            lacking = [*PARTS[name]]
        if lacking:
            raise ArgumentError(
                f"{name}={shown(part)} of type {type(part).__name__} has no {lacking[0]!r}: pass "
                f"a Decoder, a KvPool, and a Device or None, or what has {', '.join(PARTS[name])}"
            )


def _is_tokenizer(given: Any) -> bool:
    try:
        return callable(given.encode) and callable(given.decode)
    except Exception:  # noqa: BLE001  of whatever it is
        return False
