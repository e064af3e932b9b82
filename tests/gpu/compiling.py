"""Kernels compiled before the tests that launch them, side by side; the rest is loading."""

from __future__ import annotations

import os
from collections.abc import Iterable

from smkern.kernels.compile import Task, compile_all
from smkern.ops.operator_dispatch import Compile, Variant


def compile_shared(tasks: Iterable[Task]) -> None:
    """Compile these into this user's cache.

    Processes of xdist, which want the same, share the CPUs and begin at different ones: what one
    has compiled, the others find.
    """
    wanted = list(dict.fromkeys(tasks))
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    first = len(wanted) * int(worker) // count
    cpus = min(16, len(os.sched_getaffinity(0)))
    compile_all(wanted[first:] + wanted[:first], workers=max(1, cpus // count))


def compile_ahead(variants: Iterable[Variant]) -> None:
    """Compile each of these kernels once into this user's cache."""
    compile_shared(Compile(variant) for variant in variants)
