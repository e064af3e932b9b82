"""Whether two streams share a hardware queue, in which one that waits holds the other up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch

from smkern.bench.runtime.cases import QUEUES, Cell
from smkern.bench.runtime.steady_bench import SteadyBench
from smkern.runtime.cuda_device import CudaDevice

SPIN_CYCLES = 4_000_000
"""About 2 ms of an SM's clock."""
TIMEOUT_S = 0.1
TRIES = 3


def queue_cells(bench: SteadyBench) -> Iterator[Cell]:
    """For every rung, for the pairs of streams that run at the same time: 1 where they share."""
    device = bench.device
    assert isinstance(device, CudaDevice), "hardware queues are a GPU's"
    for rung in device.rungs:
        decode, prefill = bench.place("decode", rung), bench.place("prefill", rung)
        lane, other = device.stream("decode", decode), device.stream("prefill", prefill)
        partition = device.partition(decode)
        assert partition is not None
        with partition.capture() as graph:
            torch.cuda._sleep(1)
        try:
            pairs = {
                "decode_lane_and_prefill": (lane, other, None),
                "prefill_and_decode_lane": (other, lane, None),
                "prefill_and_decode_graph": (other, lane, graph),
                "green_decode_and_prefill": (partition.stream, other, None),
                "prefill_and_green_decode": (other, partition.stream, None),
            }
            with torch.cuda.stream(lane):
                graph.replay()  # the first replay uploads it
            device.synchronize()
            # a host that pauses may miss the moment: what is seen must be seen each time
            shared = {
                name: all(held_up(*pair) for _ in range(TRIES)) for name, pair in pairs.items()
            }
        finally:
            device.synchronize()
            graph.close()
        queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
        cell = bench.cell(QUEUES, int(any(shared.values())), "bool", rung=rung)
        yield cell | {"pairs": shared, "max_connections": queues}


def held_up(first: Any, second: Any, graph: Any) -> bool:
    """Whether work on the second stream waits for what is queued on the first.

    The first gets two spins. The second spin waits for the first one at the head of its queue; if
    the second stream's work, launched behind, begins only when that head is gone, they share it.
    """
    spun = torch.cuda.Event()
    done = torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(SPIN_CYCLES)
        spun.record(first)
        torch.cuda._sleep(SPIN_CYCLES)
    with torch.cuda.stream(second):
        if graph is None:
            torch.cuda._sleep(1)
        else:
            graph.replay()
        done.record(second)
    end = time.monotonic() + TIMEOUT_S
    while not done.query() and time.monotonic() < end:
        pass
    waited = spun.query()
    first.synchronize()
    second.synchronize()
    return waited
