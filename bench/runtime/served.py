"""What serving costs: host time, gaps of decode, graphs, and what three techniques are worth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from smkern.bench.runtime.cases import (
    ABLATION,
    GAP_RUNG,
    HOST,
    MEMORY,
    OURS,
    Cell,
    RuntimePlan,
)
from smkern.bench.runtime.figures import percentile
from smkern.bench.runtime.watch import Workload
from smkern.bench.runtime.workload import Sizes, open_executor
from smkern.garbage import seldom_collected
from smkern.models import Weights
from smkern.policies import StaticSplit
from smkern.runtime.device import Device, Event, Work
from smkern.runtime.model.graphs import MIB
from smkern.runtime.model.sizes import FIRST_CONTEXT
from smkern.runtime.place import Lane, Place

HOST_WORKLOAD = Workload(running=128, context=256, prompt=2048, reach=96)
HOST_SIZES = Sizes((GAP_RUNG,), max_running=144, max_tokens=2048, max_context=2048, reuse=True)
ABLATION_WORKLOAD = Workload(running=64, context=1024, prompt=4096, reach=96)
ABLATION_SIZES = Sizes((GAP_RUNG,), max_running=80, max_tokens=4096, max_context=4352, reuse=True)
MEMORY_SIZES = Sizes(
    (16, 24, 32, 40, 48, 64, 80), max_running=256, max_tokens=512, num_pages=64,
    graph_limit_bytes=64 << 30,
)  # fmt: skip
WARM_S = 0.5
PREHEAT_S = 2.0


class Blocking:
    """A device whose host waits for each launch of prefill, where `blocks` is set: no polling."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.blocks = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def launch(self, lane: Lane, place: Place, work: Work) -> Event:
        event = self._device.launch(lane, place, work)
        while self.blocks and lane == "prefill" and not event.query():
            self._device.wait([event])
        return event


def host_cells(
    plan: RuntimePlan,
    weights: Weights,
    seconds: float,
    *,
    sizes: Sizes = HOST_SIZES,
    workload: Workload = HOST_WORKLOAD,
) -> Iterator[Cell]:
    """Host time of a step with 128 requests that decode, beside prompts: poll, decide, launch; and
    the decode lane's gaps, with one step launched at a time or two, which hide the host."""
    rung = sizes.rungs[0]
    with open_executor(weights, sizes) as executor:
        executor.capture([None, rung], [workload.running], [sizes.max_context])
        one, two = (StaticSplit(rung, layers=1, steps=steps) for steps in (1, 2))
        workload.watch(executor, one, WARM_S)
        first, second = (workload.watch(executor, policy, seconds) for policy in (one, two))
        yield plan.cell(HOST, OURS, round(percentile(first.control_us, 0.5), 2), "us") | {
            "p99": round(percentile(first.control_us, 0.99), 2),
            "two_steps_p50": round(percentile(second.control_us, 0.5), 2),
            "two_steps_p99": round(percentile(second.control_us, 0.99), 2),
            "two_steps_between_us": second.figures()["between_us"],
            "running": workload.running,
            "rung": rung,
            "graphs_missed": len(executor.graphs.missed),
            **first.figures(),
        }


def ablation_cells(
    plan: RuntimePlan,
    weights: Weights,
    seconds: float,
    *,
    preheat_s: float = PREHEAT_S,
    sizes: Sizes = ABLATION_SIZES,
    workload: Workload = ABLATION_WORKLOAD,
) -> Iterator[Cell]:
    """TBT with everything, and with each of layer-wise launching, polling, look-ahead off."""
    rung, layers = sizes.rungs[0], weights.config.num_layers
    devices: list[Blocking] = []

    def blocking(given: Any) -> Blocking:
        from smkern.runtime.cuda_device import CudaDevice
        from smkern.runtime.host_device import HostDevice

        is_cpu = weights.embed.device.type == "cpu"
        devices.append(Blocking(HostDevice(rungs=given) if is_cpu else CudaDevice(given)))
        return devices[0]

    variants: dict[str, tuple[StaticSplit, bool]] = {
        "all": (StaticSplit(rung, layers=1), False),
        "layerwise_off": (StaticSplit(rung, layers=layers), False),
        "polling_off": (StaticSplit(rung, layers=1), True),
        "layerwise_and_polling_off": (StaticSplit(rung, layers=layers), True),
        "lookahead_off": (StaticSplit(rung, layers=1, steps=1), False),
        "all_off": (StaticSplit(rung, layers=layers, steps=1), True),
    }
    with open_executor(weights, sizes, blocking) as executor:
        contexts = [FIRST_CONTEXT, sizes.max_context]
        executor.capture([None, rung], [workload.running], contexts)
        for name, (policy, blocks) in variants.items():
            devices[0].blocks = blocks
            found = workload.watch(executor, policy, seconds, preheat_s=preheat_s)
            for n in (50, 99):
                value = round(percentile(found.tbt_us, n / 100) / 1e3, 3)
                cell = plan.cell(f"{ABLATION}_tbt_p{n}_ms", OURS, value, "ms", variant=name)
                yield cell | {"rung": rung, "running": workload.running, **found.figures()}


def memory_cells(
    plan: RuntimePlan, weights: Weights, *, sizes: Sizes = MEMORY_SIZES
) -> Iterator[Cell]:
    """Decode graphs of 20 buckets of rows on 7 splits, and the splits' contexts."""
    with open_executor(weights, sizes) as executor, seldom_collected():
        began = time.monotonic()
        count = executor.capture(sizes.rungs, contexts=[sizes.max_context])
        report = executor.memory_report()
        by_rung = dict.fromkeys(sizes.rungs, 0)
        for name, size in report.by_graph.items():
            by_rung[int(name.split()[0])] += size
        value = (report.graph_bytes + report.shared_bytes + report.partition_bytes) / MIB
        yield plan.cell(MEMORY, OURS, round(value, 1), "MiB") | {
            "graphs": count,
            "rungs": list(sizes.rungs),
            "graphs_mib": round(report.graph_bytes / MIB, 1),
            "graphs_mib_by_rung": [round(size / MIB, 1) for size in by_rung.values()],
            "largest_graph_mib": round(max(report.by_graph.values(), default=0) / MIB, 1),
            "shared_mib": round(report.shared_bytes / MIB, 1),
            "partitions_mib": round(report.partition_bytes / MIB, 1),
            # once for all graphs, as it would be without graphs: not part of the value
            "activations_mib": round(executor.graphs.activations.num_bytes / MIB, 1),
            "refused": len(executor.graphs.refused),
            "seconds": round(time.monotonic() - began, 1),
        }
