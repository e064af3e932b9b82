"""Where a served decode step is longer than a steady one, on the same SMs and with as many keys.

Both sides stamp the graph alone, on the decode stream, and read the clock of its SMs. What is left
of a difference lies between the graphs (rows that change, tokens that are copied, the host) or in
the graph itself, which differs by what is varied here: keys beyond the end of a piece of attention,
the context that the graph's plan is sized by, how tokens are drawn, the prompts beside it, where
the pages lie.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

from smkern.bench.runtime.cases import EQUAL, OURS, Cell
from smkern.bench.runtime.figures import Spans, tbt
from smkern.bench.runtime.served_load import ServedLoad
from smkern.bench.runtime.smkern_steps import SmkernSteps
from smkern.bench.runtime.stamps import Stamps, stamps_on
from smkern.bench.runtime.steady_bench import SteadyBench
from smkern.kv import KvPool
from smkern.policies import StaticSplit
from smkern.runtime.model.sizes import FIRST_CONTEXT
from smkern.runtime.place import Place

EQUAL_RUNGS = (20, 26)
REACH = 64
PREHEAT_S = 2.0
SHORT = FIRST_CONTEXT - REACH - 16
"""A context whose windows stay under the first bucket of graphs."""


def steady_cells(bench: SteadyBench, rung: int, seconds: float) -> Iterator[Cell]:
    """A steady step alone, and beside prompts, there with the plan's keys and one more: behind a
    whole piece of attention a key costs another piece."""
    bench.prepare(rung)
    steps, keys = bench.steps, bench.plan.context
    assert isinstance(steps, SmkernSteps)
    alone = bench.steps_alone(rung, seconds=seconds / 4)
    yield _steady_cell(bench, alone, rung, keys, "no_prompts", None)
    try:
        for more in (0, 1):
            steps.set_lengths(keys + more)
            found = bench.together(rung, seconds=seconds)
            cell = _steady_cell(bench, found.steps, rung, keys + more, "prompts", found.sm_mhz)
            yield cell | {"tokens_per_ms": round(found.tokens_per_ms, 3)}
    finally:
        steps.set_lengths(keys)


def served_cells(load: ServedLoad, rung: int, seconds: float) -> Iterator[Cell]:
    """A served step as the steady ones are, and with one thing changed at a time."""
    one, two = (StaticSplit(rung, layers=1, steps=n, move=False) for n in (1, 2))
    short = min(SHORT, load.workload.context)
    variants: dict[str, tuple[StaticSplit, int, dict[str, Any]]] = {
        "prompts": (two, 0, {}),
        "flat_top_p": (two, 0, {"flat": True}),
        "one_step": (one, 0, {}),
        "no_prompts": (two, 0, {"waiting": 0}),
        "short": (two, 0, {"context": short}),
        "short_large_plan": (two, load.executor.max_context, {"context": short}),
        "random_pages": (two, 0, {}),
    }
    for name, (policy, least, changes) in variants.items():
        if name == "random_pages":
            deal_at_random(load.executor.pool)
        given = {"reach": min(REACH, load.workload.reach), **changes}
        with stamped(load, least) as stamps:
            preheat_s = min(PREHEAT_S, load.preheat_s)
            found = load.watch(policy, seconds, preheat_s=preheat_s, rung=rung, **given)
            graphs = Spans.of(stamps.us())
        windows = [graphs_at(graphs, at) for at in found.from_last]
        case = {"side": "served", "rung": rung, "variant": name}
        cell = load.plan.cell(EQUAL, OURS, _graph_ms(windows), "ms", **case)
        yield (
            cell
            | found.figures()
            | {
                "between_graphs_us": _between_us(windows),
                "late": round(found.late, 4),
                "ms_by_keys": found.ms_by_keys,
            }
        )


def graphs_at(graphs: Spans, from_last: Sequence[int]) -> Spans:
    """Some of the graphs, each named by where it is from the last on."""
    begins, ends = graphs.begins, graphs.ends
    known = [i for i in from_last if -len(ends) <= i]
    return Spans(tuple(begins[i] for i in known), tuple(ends[i] for i in known))


def deal_at_random(pool: KvPool) -> None:
    """Let a pool give its pages in random order from now on, as steady rows have theirs."""
    pool.forget_prefixes()
    names = [("dealt", i) for i in range(pool.num_available)]
    for name in names:
        pool.allocate(name, [0])
    Random(0).shuffle(names)
    for name in names:
        pool.release(name)


class StampedGraphs:
    """Decode graphs with a stamp in front of each launch and one behind.

    Args:
        graphs: The executor's.
        stamps: Get the moments.
        least: Keys that the graphs must hold at least, whatever the rows have.
    """

    def __init__(self, graphs: Any, stamps: Stamps, least: int = 0) -> None:
        self._graphs, self._stamps, self._least = graphs, stamps, least

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graphs, name)

    def __len__(self) -> int:
        return len(self._graphs)

    def launch(self, place: Place, batch: int, longest: int) -> None:
        self._stamps.mark()
        self._graphs.launch(place, batch, max(longest, self._least))
        self._stamps.mark()


@contextmanager
def stamped(load: ServedLoad, least: int = 0) -> Iterator[Stamps]:
    """The begin and end of each decode graph of an executor; `least`: see `StampedGraphs`."""
    executor = load.executor
    graphs, stamps = executor.graphs, stamps_on(executor.pool.device)
    executor.graphs = StampedGraphs(graphs, stamps, least)  # type: ignore[assignment]
    try:
        yield stamps
    finally:
        executor.synchronize()
        executor.graphs = graphs


def _steady_cell(
    bench: SteadyBench, spans: Spans, rung: int, keys: int, variant: str, mhz: float | None
) -> Cell:
    case = {"side": "steady", "rung": rung, "variant": variant, "keys": keys}
    times = {name: value for name, value in tbt(spans.periods_us).items() if name != "steps_ms"}
    return (
        bench.cell(EQUAL, _graph_ms([spans]), "ms", **case)
        | times
        | {"between_graphs_us": _between_us([spans]), "sm_mhz": mhz}
    )


def _graph_ms(windows: Sequence[Spans]) -> float:
    pairs = (pair for x in windows for pair in zip(x.begins, x.ends, strict=True))
    return round(statistics.median(end - begin for begin, end in pairs) / 1e3, 4)


def _between_us(windows: Sequence[Spans]) -> float:
    pairs = (pair for x in windows for pair in zip(x.ends, x.begins[1:], strict=False))
    return round(statistics.median(begin - end for end, begin in pairs), 2)
