"""Types of command-line options: lists of numbers, lists of weight shapes, epilogues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from smkern.tuning.config import Epilogue

if TYPE_CHECKING:
    from smkern.measure.gemm import Shape

MAX_NUMBER = 1 << 20
"""Above any number of rows or SMs that is listed: a longer range would not end."""


class Positive(click.ParamType):
    """A finite number above 0; click's ranges take one that is none, nan."""

    name = "float"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = click.FLOAT.convert(value, param, ctx)
        if not 0 < number < float("inf"):
            self.fail(f"{value}: give a finite number above 0", param, ctx)
        return float(number)


class Floats(click.ParamType):
    """Numbers above 0: 10,15,30."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers; write 10,15,30", param, ctx)
        if not all(0 < number < float("inf") for number in found):
            self.fail(f"{value!r} has a number that is not finite and above 0", param, ctx)
        return found


class IntList(click.ParamType):
    """Integers and ranges: `16,32`, `16-132:2` (every second from 16 to 132)."""

    name = "integers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = [number for part in str(value).split(",") for number in _range(part)]
        except ValueError:
            self.fail(f"{value!r} is not a list of integers; write 16,32 or 16-132:2", param, ctx)
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} has a number below 1; write 16,32 or 16-132:2", param, ctx)
        return tuple(numbers)


class ShapeList(click.ParamType):
    """Weight shapes as NxK: `6144x4096,4096x14336`."""

    name = "shapes"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Shape, ...]:
        if isinstance(value, tuple):
            return value
        shapes = []
        for part in str(value).split(","):
            sizes = part.lower().split("x")
            if len(sizes) != 2 or not all(map(_is_size, sizes)):
                self.fail(f"{part!r} is not NxK; write 6144x4096", param, ctx)
            shapes.append((int(sizes[0]), int(sizes[1])))
        return tuple(shapes)


def _is_size(word: str) -> bool:
    return word.isdecimal() and len(word) < 10 and int(word) > 0


def _range(part: str) -> range:
    span, _, step = part.partition(":")
    first, _, last = span.partition("-")
    found = range(int(first), int(last or first) + 1, int(step or 1))
    if max(abs(found.start), abs(found.stop)) > MAX_NUMBER:
        raise ValueError(f"{part} has a number above {MAX_NUMBER}")
    return found


def parse_epilogue(text: str) -> Epilogue:
    """`bias+residual+silu` or `swiglu` -> Epilogue, `none` the empty one: inverse of `.key`.

    Raises:
        ArgumentError: a part is none of bias, residual, silu, gelu.
    """
    from smkern.ops.gemm.warmup import epilogue_from

    return Epilogue(swiglu=True) if text == "swiglu" else epilogue_from(text)


def stacked(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several decorators as one, the first outermost."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate
