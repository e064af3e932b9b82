"""Ranks as processes, forked from one that has imported everything: torch takes seconds to load."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from secrets import randbelow
from typing import Any, NamedTuple

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch.distributed", "smkern.models.tensor_parallel",
                               "tests.models.rank_case", "tests.runtime.ranks.case"])  # fmt: skip
LIMIT_S = 60.0


class Outcome(NamedTuple):
    """What became of a rank: what it returned or raised, and its exit status."""

    result: Any
    error: str
    status: int | None


def free_port() -> int:
    """A port below those that the system gives to connections: one of these would be given away
    before a rank listens."""
    while True:
        port = 20_000 + randbelow(12_000)
        with suppress(OSError), socket.socket() as found:
            found.bind(("127.0.0.1", port))
            return port


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def _one(
    run: Callable[..., Any],
    env: dict[str, str],
    pipe: Any,
    arguments: tuple[Any, ...],
    limit_s: float,
) -> None:
    import torch

    faulthandler.dump_traceback_later(limit_s)  # where it hangs
    os.environ.update(env)
    torch.set_num_threads(1)
    try:
        found = run(*arguments), ""
    except Exception as error:  # noqa: BLE001  the parent looks at it
        traceback.print_exc()
        found = None, f"{type(error).__name__}: {error}"
    with suppress(OSError):
        pipe.send(found)
    pipe.close()
    os._exit(0)  # no farewell between groups of which some are dead


def on_processes(
    size: int,
    run: Callable[..., Any],
    *arguments: Any,
    left_behind: int | None = None,
    limit_s: float = LIMIT_S,
) -> list[Outcome]:
    """What `run` does on each rank; a rank that is `left_behind` is killed when all others ended.

    Args:
        size: Ranks.
        run: A function of a module that the ranks import.
        arguments: Its arguments.
        left_behind: A rank that does not end by itself.
        limit_s: How long a rank may take.
    """
    port, ranks = free_port(), []
    for rank in range(size):
        here, there = _FORKS.Pipe(duplex=False)
        env = environment(rank, size, port)
        process = _FORKS.Process(
            target=_one, args=(run, env, there, arguments, 0.95 * limit_s), daemon=True
        )
        process.start()
        there.close()
        ranks.append((process, here))
    found = []
    for rank, (process, here) in enumerate(ranks):
        said: tuple[Any, str] = None, ""
        if rank != left_behind:
            with suppress(EOFError):
                said = here.recv() if here.poll(limit_s) else (None, "it did not end")
            process.join(5)
        found.append(Outcome(*said, process.exitcode))
    left = [process for process, _ in ranks if process.is_alive()]
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    for process in left:  # one may end only when another has
        process.join()
    return found
