"""Compiled kernels of all families, and compiling many in parallel, without a GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
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


def artifact_of(kernel: Any, variant: str, capability: int) -> Artifact:
    """What a launch needs of a kernel that Triton compiled.

    Args:
        kernel: As `triton.compile` returns it.
        variant: Its name for messages.
        capability: The device's compute capability, such as 90.

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


Task = Callable[[], object]
"""Compiles something into a disk cache; other processes run it, so it can be pickled."""


class Compilations:
    """Compilations side by side in processes, begun as they are given.

    Importing what compiles takes a process some seconds, and choosing what to compile takes others:
    what is given early is compiled meanwhile.

    Args:
        workers: Processes, at most; 1: `wait` compiles here.

    Example:
        >>> from functools import partial
        >>> with Compilations(workers=1) as compilations:
        ...     compilations.begin([partial(print, "one")])
        ...     compilations.wait()
        one
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._tasks: dict[Task, Future[None] | None] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Compilations:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._tasks)

    def begin(self, tasks: Iterable[Task]) -> None:
        """Compile these too, each once; there is no process for a single task.

        Raises:
            BrokenProcessPool: a process has ended early.
        """
        for task in tasks:
            self._tasks.setdefault(task)
        if self._workers <= 1 or len(self._tasks) <= 1:
            return
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, mp_context=context)
        for task, future in self._tasks.items():
            if future is None:
                self._tasks[task] = self._pool.submit(_run_only, task)

    def wait(self, done: Callable[[int, int], None] | None = None) -> None:
        """Until all are compiled; `done(finished, total)` is called after each one.

        Raises:
            BrokenProcessPool: a process has ended early.
        """
        begun = [future for future in self._tasks.values() if future is not None]
        ended: Iterable[Task] = (future.result for future in as_completed(begun))
        for count, end in enumerate(ended if begun else self._tasks, 1):
            end()
            if done:
                done(count, len(self._tasks))


def compile_all(
    tasks: Sequence[Task], *, workers: int, done: Callable[[int, int], None] | None = None
) -> None:
    """Run compilations into the disk caches with `workers` processes; results are dropped.

    `done(finished, total)` is called after each one.
    """
    with Compilations(workers) as compilations:
        compilations.begin(tasks)
        compilations.wait(done)


def _run_only(task: Task) -> None:
    task()
