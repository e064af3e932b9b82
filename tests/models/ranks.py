"""Ranks of a model as threads of one process, whose sums are made here in the order of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smkern.models import TensorParallel
from smkern.models.tensor_parallel import Collective

WAIT_S = 60.0


class ThreadSums:
    """Sums over threads; counts its calls.

    Attributes:
        calls: Sums so far.
        cuts: Rows at which layers of more rows are cut in two.
        log: What rank 0 computed and added of layers, rows of each.
    """

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._given: dict[int, Tensor] = {}
        self._size = size
        self.calls = 0
        self.cuts: int | None = None
        self.log: list[tuple[str, int]] = []

    def at(self, rank: int) -> Any:
        """One rank's end."""

        class End(Collective):
            def all_reduce(end, x: Tensor) -> None:  # noqa: N805
                assert x.is_contiguous()
                self._given[rank] = x.clone()
                self._barrier.wait()
                everyone = [self._given[i].float() for i in range(self._size)]
                self._barrier.wait()
                x.copy_(torch.stack(everyone).sum(0))
                self.calls += rank == 0
                if rank == 0:
                    self.log.append(("add", len(x)))

            def pieces(end, num_rows: int, num_sms: int | None = None) -> Any:  # noqa: N805
                if self.cuts is None or num_rows <= self.cuts:
                    return ()
                return slice(0, self.cuts), slice(self.cuts, num_rows)

            def send(end, x: Tensor) -> None:  # noqa: N805
                if rank == 0:
                    self.log.append(("send", len(x)))

        return End()

    def stop(self) -> None:
        self._barrier.abort()


def on_ranks(
    size: int, run: Callable[[TensorParallel], Any], cuts: int | None = None
) -> tuple[list[Any], ThreadSums, ThreadSums]:
    """What `run` returns on each rank; the sums of decode and of prefill.

    Args:
        size: How many ranks.
        run: What each does.
        cuts: Of prefill: see `ThreadSums`.
    """
    lanes = ThreadSums(size), ThreadSums(size)
    lanes[1].cuts = cuts
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        tp = TensorParallel(rank, size)
        tp.decode, tp.prefill = (lane.at(rank) for lane in lanes)
        try:
            with torch.inference_mode():
                found[rank] = run(tp)
        except BaseException as error:  # noqa: BLE001  raised by the caller's thread
            errors.append(error)
            for lane in lanes:
                lane.stop()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found, *lanes
