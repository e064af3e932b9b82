"""Policies by a name and settings, as commands and tables say them: "static_split:32"."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

from smkern.errors import ArgumentError
from smkern.policies import POLICIES, Policy
from smkern.policies.base import BasePolicy

if TYPE_CHECKING:
    from smkern.latency.predictor import Predictor


def parsed(spec: str) -> tuple[type[BasePolicy], dict[str, Any]]:
    """The policy and the settings of "name", "name:value" or "name:key=value:key=value".

    Raises:
        ArgumentError: no such policy, a setting given twice, or a value without a name where the
            policy has no first one.

    Example:
        >>> parsed("static_split:32")
        (<class 'smkern.policies.static_split.StaticSplit'>, {'decode_sms': 32})
    """
    name, *words = spec.strip().split(":")
    if name not in POLICIES:
        raise ArgumentError(f"policy {name!r}: there is {', '.join(sorted(POLICIES))}")
    policy = POLICIES[name]
    first = next(iter(signature(policy).parameters))
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            if first == "predictor":  # nothing that a text could say
                raise ArgumentError(f"policy {spec!r}: name what {word!r} is: {name}:key={word}")
            key, value = first, word
        if key in given:
            raise ArgumentError(f"policy {spec!r} gives {key} twice: give it once")
        given[key] = _value(value)
    return policy, given


def policy_named(
    spec: str,
    predictor: Predictor | None = None,
    *,
    tbt_slo_ms: float | None = None,
    order: str = "fcfs",
) -> Policy:
    """A new policy.

    Args:
        spec: "name", "name:value" or "name:key=value:...", see `parsed`.
        predictor: Prices launches.
        tbt_slo_ms: Limit of the time between tokens; a chunk size of its own takes its place.
        order: In which order requests wait.

    Raises:
        ArgumentError: no such policy, or settings that it refuses or does not know.
    """
    make: Callable[..., Policy]
    make, given = parsed(spec)
    known = signature(make).parameters
    unknown = [key for key in given if key not in known]
    if unknown:
        settable = [key for key in known if key != "predictor"]
        raise ArgumentError(
            f"policy {spec!r} has no {', '.join(unknown)}; its settings are {', '.join(settable)}"
        )
    if "chunk_tokens" in given:  # a chunk of its own, whatever the limit
        tbt_slo_ms = None
    settings = {"predictor": predictor, "tbt_slo_ms": tbt_slo_ms, "order": order, **given}
    return make(**{key: value for key, value in settings.items() if key in known})


def name_of(policy: Policy) -> str:
    """What tables call it: its `repr`, or its class where it has none of its own."""
    kind = type(policy)
    return kind.__name__ if kind.__repr__ is object.__repr__ else repr(policy)


def asks_predictor(spec: str) -> bool:
    """Whether `policy_named` makes a policy that asks how long launches take.

    Raises:
        ArgumentError: as `parsed`.
    """
    policy, given = parsed(spec)
    return policy.asks_predictor and "chunk_tokens" not in given


def _value(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(word.lower(), word)
