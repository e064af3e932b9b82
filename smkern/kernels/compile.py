"""Compiled kernels of all families, and compiling many in parallel, without a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from smkern.errors import DeviceError
from smkern.tuning.constraints import shared_limit


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled variant: device code and what its launch needs."""

    name: str
    cubin: bytes
    num_threads: int
    shared_bytes: int
    swizzles: tuple[int, ...]
    boxes: tuple[tuple[int, ...], ...]
    unit: int


def check_shared(kernel: str, needed: int, capability: int) -> None:
    """Raise `DeviceError` for a kernel that needs more shared memory than a CTA may have.

    The compiler does not check it: such a kernel would only fail when it is loaded.

    Args:
        kernel: Name for the message.
        needed: Shared memory that the kernel needs, bytes.
        capability: The device's compute capability, such as 90.
    """
    limit = shared_limit(divmod(capability, 10))
    if needed > limit:
        raise DeviceError(
            f"{kernel} needs {needed} bytes of shared memory; the limit is {limit} on sm_"
            f"{capability}. Use fewer stages or smaller tiles."
        )


def compile_all(
    tasks: Sequence[Callable[[], object]],
    *,
    workers: int,
    done: Callable[[int, int], None] | None = None,
) -> None:
    """Run compilations into the disk caches with `workers` processes; results are dropped.

    `done(finished, total)` is called after each one.
    """
    if workers <= 1 or len(tasks) <= 1:
        for i, task in enumerate(tasks):
            task()
            if done:
                done(i + 1, len(tasks))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), mp_context=context) as pool:
        for i, future in enumerate(as_completed(pool.submit(_run_only, t) for t in tasks)):
            future.result()
            if done:
                done(i + 1, len(tasks))


def _run_only(task: Callable[[], object]) -> None:
    task()
