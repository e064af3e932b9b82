"""Kernels compiled side by side in the background, while others are measured."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

import click

from smkern.autotune.stop import Stop

if TYPE_CHECKING:  # each process imports this module, and torch takes seconds
    from smkern.autotune.family import Tasks

_LOOK_EVERY_S = 0.2


class Compiler:
    """Processes that compile into this user's cache, what was asked for first first.

    What fails here is compiled again, and named, where it is measured.

    Args:
        workers: Processes.
    """

    def __init__(self, workers: int) -> None:
        self._others = set(multiprocessing.active_children())
        self._pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=signal.signal,
            # Ctrl-C reaches all of a terminal's processes; this one decides
            initargs=(signal.SIGINT, signal.SIG_IGN),
        )
        self._made: dict[Hashable, Future[None]] = {}

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        """End at once: a cache's files are whole or not there."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - self._others:
            process.terminate()

    def start(self, tasks: Tasks) -> None:
        """Compile these too, where they are new."""
        for variant, task in tasks.items():
            if variant in self._made:
                continue
            try:
                self._made[variant] = self._pool.submit(_run, task)
            except BrokenProcessPool as error:
                self._made[variant] = Future()
                self._made[variant].set_exception(error)

    def wait(self, variants: Iterable[Hashable], stop: Stop) -> bool:
        """Whether these are compiled, or have failed to; False: it is time to stop."""
        left = {self._made[variant] for variant in variants}
        while left and stop.why is None:
            left = wait(left, timeout=_LOOK_EVERY_S).not_done
        return not left

    def report(self) -> None:
        """Say what did not compile."""
        ended = (x for x in self._made.values() if x.done() and not x.cancelled())
        errors = [error for x in ended if (error := x.exception()) is not None]
        if errors:
            text = (str(errors[0]) or type(errors[0]).__name__).splitlines()[0][:200]
            click.echo(f"{len(errors)} variants do not compile: {text}", err=True)


def _run(task: Callable[[], object]) -> None:
    """Compile, and drop what is returned: the cache has the device code."""
    task()
