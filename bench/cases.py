"""What is measured: shapes, rows and budgets of the GEMM suites, and how options name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from smkern.bench.results import results_folder

Shape = tuple[int, int]
"""(n, k) of the weight [n, k]."""

SHAPES: tuple[Shape, ...] = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (24576, 4096),
    (4096, 12288),
)
MS = (1, 8, 16, 32, 64, 77, 128, 256, 512, 1000, 1024, 2048, 3001, 4096, 8192)
BUDGETS = (16, 32, 48, 60, 72, 84, 100, 116, 132)

STREAMING_SHAPE: Shape = (28672, 4096)
STREAMING_MS = (1, 8, 16, 32, 64)
STREAMING_BUDGETS = (24,)
"""Measured in addition: decode sizes on the widest weight, where bandwidth bends."""


@dataclass(frozen=True, slots=True)
class Group:
    """One case in one budget: all its providers are timed in the same rounds."""

    n: int
    k: int
    m: int
    num_sms: int

    @property
    def case(self) -> dict[str, Any]:
        return {"m": self.m, "n": self.n, "k": self.k, "dtype": "bf16"}


def gemm_groups(
    shapes: tuple[Shape, ...] = SHAPES,
    ms: tuple[int, ...] = MS,
    budgets: tuple[int, ...] = BUDGETS,
    *,
    streaming: bool = False,
) -> list[Group]:
    """All groups, a shape after the other, so that its operands are made once.

    `streaming` adds `STREAMING_BUDGETS` for the decode sizes of `STREAMING_SHAPE`.
    """
    return [
        Group(n, k, m, num_sms)
        for n, k in shapes
        for m in ms
        for num_sms in _budgets_of((n, k), m, budgets, streaming)
    ]


def _budgets_of(shape: Shape, m: int, budgets: tuple[int, ...], streaming: bool) -> list[int]:
    extra = streaming and shape == STREAMING_SHAPE and m in STREAMING_MS
    return sorted({*budgets, *(STREAMING_BUDGETS if extra else ())})


class IntList(click.ParamType):
    """Integers and ranges: `16,32`, `16-132:2` (every second from 16 to 132)."""

    name = "integers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = [number for part in str(value).split(",") for number in _range(part)]
        except ValueError:
            self.fail(f"{value!r} is no list of integers; write 16,32 or 16-132:2", param, ctx)
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} names a number below 1", param, ctx)
        return tuple(numbers)


class ShapeList(click.ParamType):
    """Weights as NxK: `6144x4096,4096x14336`."""

    name = "shapes"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Shape, ...]:
        if isinstance(value, tuple):
            return value
        shapes = []
        for part in str(value).split(","):
            sizes = part.lower().split("x")
            if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
                self.fail(f"{part!r} is no NxK; write 6144x4096", param, ctx)
            shapes.append((int(sizes[0]), int(sizes[1])))
        return tuple(shapes)


def _range(part: str) -> list[int]:
    span, _, step = part.partition(":")
    first, _, last = span.partition("-")
    return list(range(int(first), int(last or first) + 1, int(step or 1)))


def stacked(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Decorators as one, the first outermost."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def file_options(suite: str, *, quick: str) -> Callable[[Any], Any]:
    """The options --out, --resume and --quick, which `quick` is the help of."""
    return stacked(
        click.option(
            "--out",
            type=click.Path(path_type=Path, dir_okay=False),
            default=lambda: results_folder() / f"{suite}.json",
            show_default=f"bench/results/<this GPU>/{suite}.json",
            help="Results file.",
        ),
        click.option("--resume", is_flag=True, help="Keep the file's cells, measure the others."),
        click.option("--quick", is_flag=True, help=quick),
    )


def common_options(suite: str) -> Callable[[Any], Any]:
    """The options every GEMM suite takes: --out --resume --quick --shapes --ms --budgets."""
    return stacked(
        file_options(suite, quick="A few cells only: seconds of GPU time."),
        click.option("--shapes", type=ShapeList(), default=None, help="Weights, as NxK,NxK."),
        click.option("--ms", type=IntList(), default=None, help="Rows of the activations."),
        click.option(
            "--budgets", type=IntList(), default=None, help="SM counts: 16,32 or 16-132:2"
        ),
    )
