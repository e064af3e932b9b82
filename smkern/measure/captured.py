"""Launches captured to be timed: none of their kernels waits for the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smkern.models.graph import captured
from smkern.partition import Partition

Run = Callable[[], Any]


class Captured:
    """Launches as a graph of the stream that they are captured on; on a CPU they just run.

    Args:
        run: What is captured.
        partition: Where; None: a stream of its own on the whole device.
        on_gpu: Whether there is a graph.
        pool: A memory pool that graphs share which never run at the same time.
    """

    def __init__(
        self, run: Run, partition: Partition | None, *, on_gpu: bool, pool: Any = None
    ) -> None:
        self._run = run  # a graph has the addresses of what this holds
        self.replay: Run = run
        self.close: Run = lambda: None
        if not on_gpu:
            return
        if partition is not None:  # the device's own wait may end before its stream's graphs do
            partition.stream.synchronize()
        torch.cuda.synchronize()
        graph = captured(run, torch.device("cuda"), partition=partition, pool=pool)
        torch.cuda.synchronize()
        self.close = graph.reset if partition is None else graph.close
        self.replay = graph.replay
