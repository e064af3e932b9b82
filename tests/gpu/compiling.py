"""Kernels compiled before the tests that launch them, side by side; the rest is loading."""

from __future__ import annotations

import os
from collections.abc import Iterable

from smkern.kernels.compile import compile_all
from smkern.ops.operator_dispatch import Compile, Variant


def workers() -> int:
    """Processes that compile at once."""
    return min(16, len(os.sched_getaffinity(0)))


def compile_ahead(variants: Iterable[Variant]) -> None:
    """Compile each of these kernels once into this user's cache."""
    compile_all([Compile(variant) for variant in dict.fromkeys(variants)], workers=workers())
