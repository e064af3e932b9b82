"""Arguments held to their annotations, for what plans, explains and warms up: no tensor is there.

Annotations are read as they are written: "int", "Sequence[torch.dtype] | None".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar, get_args

import torch

from smkern.device import Confinement
from smkern.errors import ArgumentError
from smkern.limits import as_flag, as_float, as_int, shown
from smkern.tuning.fp8 import Scales
from smkern.tuning.fp8_rows import OutScale

P = ParamSpec("P")
R = TypeVar("R")

_KNOWN: dict[str, type] = {"torch.dtype": torch.dtype, "str": str}
_CHOICES = {"Confinement": Confinement, "Scales": Scales, "OutScale": OutScale}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose arguments are checked first; `num_sms` is left to the budget's check."""
    known = signature(function)

    @wraps(function)
    def run(*args: P.args, **options: P.kwargs) -> R:
        _check_all(known.bind(*args, **options).arguments, function.__annotations__)
        return function(*args, **options)

    return run


def check_fields(made: Any) -> None:
    """Raise ArgumentError for a field of a dataclass that is not what its annotation says."""
    kinds = {field.name: str(field.type) for field in fields(made)}
    _check_all({name: getattr(made, name) for name in kinds}, kinds)


def _check_all(values: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    for name, value in values.items():
        kind = kinds[name]
        if name != "num_sms" and not (value is None and kind.endswith("| None")):
            _check(name, value, kind.removesuffix("| None").strip())


def _check(name: str, value: Any, kind: str) -> None:
    if kind == "int":
        if isinstance(value, torch.Tensor):  # which may count as one, and is kept as it is
            raise ArgumentError(f"{name}={shown(value)}: pass an int")
        as_int(name, value, 0)
    elif kind == "float":
        as_float(name, value)
    elif kind == "bool":
        as_flag(name, value)
    elif kind in _CHOICES:
        names = get_args(_CHOICES[kind])
        if not (isinstance(value, str) and value in names):
            raise ArgumentError(f"{name}={shown(value)}: use one of {names}")
    elif kind in _KNOWN:
        if not isinstance(value, _KNOWN[kind]):
            raise ArgumentError(f"{name}={shown(value)}: pass a {kind}")
    elif kind == "Warmable":
        if not hasattr(value, "work"):
            raise ArgumentError(f"{name} has {shown(value)}: pass smkern.RowsCalls and the like")
    elif kind.startswith("Iterable["):
        if not hasattr(value, "__iter__") or isinstance(value, torch.Tensor):
            raise ArgumentError(f"{name}={shown(value)}: pass a list")
    elif kind == "tuple[int, int]":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ArgumentError(f"{name} has {shown(value)}: pass two whole numbers")
        for x in value:
            as_int(name, x, 0)
    elif kind.startswith("Sequence["):
        if not isinstance(value, list | tuple | range):
            raise ArgumentError(f"{name}={shown(value)}: pass a list")
        for x in value:
            _check(name, x, kind[len("Sequence[") : -1])
