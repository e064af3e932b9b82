"""Compiled kernels of all families, and compiling many in parallel, without a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

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


def artifact_of(kernel: Any, variant: str, capability: int, unit: int = 1) -> Artifact:
    """What a launch needs of a kernel that Triton compiled.

    Args:
        kernel: As `triton.compile` returns it.
        variant: Its name for messages.
        capability: The device's compute capability, such as 90.
        unit: Elements that its strides count.

    Raises:
        DeviceError: it needs more shared memory than a CTA may have.
    """
    meta = kernel.metadata
    check_shared(variant, meta.shared, capability)
    descriptors = meta.tensordesc_meta or []
    return Artifact(
        name=meta.name,
        cubin=kernel.asm["cubin"],
        num_threads=meta.num_warps * 32,
        shared_bytes=meta.shared,
        swizzles=tuple(x["swizzle"] for x in descriptors),
        boxes=tuple(tuple(x["block_size"]) for x in descriptors),
        unit=unit,
    )


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
