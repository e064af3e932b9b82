"""What the tests of confinement share: a launch whose CTAs leave the SMs that they ran on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from smkern.errors import WarmupError
from smkern.ops.gemm.dispatch import gemm_dispatcher
from smkern.tuning.config import Budget, GemmProblem
from tests.gpu.sides import sides


class Run(Protocol):
    """A call's launch in a budget."""

    def launch(self, stream: int) -> None: ...

    def smids(self) -> Counter[int]:
        """CTAs of the launches since the last call, by SM."""
        ...

    def reset(self) -> None:
        """Inputs as they were, results poisoned."""
        ...

    def check(self) -> None:
        """Hold the results against the reference."""
        ...


def check_masked(run: Run, partition: Any) -> Counter[int]:
    """A launch on the partition's stream runs inside, on eight SMs or more; its CTAs by SM."""
    run.launch(partition.raw_stream)
    partition.synchronize()
    seen = run.smids()
    assert set(seen) <= set(partition.smids)
    assert len(seen) >= 8
    run.check()
    return seen


def check_replayed(run: Run, partition: Any) -> None:
    """So does a graph of it, each time."""
    with partition.capture() as graph:
        run.launch(torch.cuda.current_stream().cuda_stream)
    for _ in range(3):
        run.reset()
        partition.launch(graph)
        partition.synchronize()
        assert set(run.smids()) <= set(partition.smids)
        run.check()
    graph.close()


def check_capped(run: Run, most_ctas: int) -> None:
    """Launches on the current stream, and a graph, have `most_ctas` CTAs at most."""
    stream = torch.cuda.current_stream().cuda_stream
    for _ in range(2):
        run.reset()
        run.launch(stream)
        assert sum(run.smids().values()) <= most_ctas
        run.check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.launch(torch.cuda.current_stream().cuda_stream)
    run.reset()
    graph.replay()
    assert sum(run.smids().values()) <= most_ctas
    run.check()


def check_dispatched(problems: Iterable[GemmProblem], budget: Budget) -> None:
    """What is dispatched to has no more CTAs than the budget lets it."""
    dispatcher = gemm_dispatcher(torch.cuda.current_device())
    for problem in problems:
        config = dispatcher.select(problem, budget, "own").config
        plan: Any = dispatcher.prepare(problem, config, budget)
        on_sm = config.ctas_per_sm if budget.confined == "mask" else 1
        assert plan.num_ctas <= budget.num_sms * on_sm


def check_partition_graphs(call: Callable[[Tensor | None], Tensor]) -> None:
    """In four partitions a graph of `call(out)` has the bits of `call(None)`, each time."""
    for partition in sides():
        torch.cuda.synchronize()
        with partition:
            want = call(None)
        torch.cuda.synchronize()
        out = torch.empty_like(want)
        torch.cuda.synchronize()
        with partition.capture() as graph:
            call(out)
        for _ in range(3):
            out.fill_(float("nan"))
            torch.cuda.synchronize()
            partition.launch(graph)
            partition.synchronize()
            assert torch.equal(out, want)
        del want, graph


def captured_once_loaded(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of a call that a capture refuses until its kernel is loaded, here by the call."""
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmupError, match=r"smkern.warmup"), torch.cuda.graph(graph):
        call()
    torch.cuda.synchronize()
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def check_streams(want: Tensor, call: Callable[[Tensor], object]) -> None:
    """On four streams at once each `call(out)` has the bits of `want`."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = [[torch.empty_like(want) for _ in range(20)] for _ in streams]
    torch.cuda.synchronize()
    for i in range(20):
        for stream, mine in zip(streams, outs, strict=True):
            with torch.cuda.stream(stream):
                call(mine[i])
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for mine in outs for out in mine)
