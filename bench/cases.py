"""What is measured: shapes, rows and budgets of the GEMM suites, and how options name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from smkern.bench.results import results_folder
from smkern.measure.gemm import BUDGETS, MS, SHAPES, Shape
from smkern.measure.options import IntList, ShapeList, stacked

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
