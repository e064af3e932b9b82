"""`smkern bench replay-ablations`: goodput where one thing is left out or otherwise, simulated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from smkern.bench.replay.cases import RUNGS, Case, Cell, sizes_of
from smkern.bench.replay.command import PREHEAT_S
from smkern.bench.replay.grid import SEARCH_OPTIONS, SIMULATED_OPTIONS, processes
from smkern.bench.replay.measure import How, goodput_cell, rate_cell
from smkern.bench.results import cell_key
from smkern.bench.suite import Output, suite_command
from smkern.latency import Size
from smkern.latency.nearest import predictor_for
from smkern.latency.predictor import Predictor
from smkern.latency.regression import ContentionIgnored
from smkern.models.presets import preset
from smkern.policies import Policy
from smkern.profile import load_profile
from smkern.replay import SimServer, Trace
from smkern.replay.named import parsed
from smkern.replay.run import Server
from smkern.replay.varied import SPREAD

MODEL = "qwen3-8b"
WAVE_EDGES = (18, 22, 38, 46, 48, 54, 62)
"""Rungs from 16 to 64 at which two SMs more for decode would cost prompts most: layers of 2,048
tokens beside 64 rows of 1,200 keys take 3.5 to 5.5% longer then, and 0 to 3.4% at the others."""
SLOWER = (0.7, 1.3, 1.6)
"""Of what neighbours slow a launch by: a GPU that has no table of its own."""
CACHE_RPS, LIMITS_RPS = 1.5, 13.4
"""Rates at which two ablations are looked at, on a GPU too: half of what `Adaptive` serves of
Mooncake's conversations with its cache, and two thirds of Azure's."""
MUXWISE = "muxwise:margin=0.08"
"""With the margin that is best for it at 30 and 50 ms."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """A policy in a place of the goodput table, with something left out or otherwise.

    Attributes:
        question: What is asked; the first of a question's is what the others are held against.
        variant: What is otherwise.
        policy: Its name, with settings that a text can say.
        settings: Others.
        trace, limit_ms, order: Where; None: no limit.
        rungs: SMs of the decode side of each split; (): all of the simulated device's.
        off: The policy's predictor says so many times what it should.
        sees_neighbours: Whether that says that launches are slower beside others.
        contention: What others slow a launch by is so many times what it says.
        spread: Of launches' times, see `Varied`.
        reuses: Whether a prompt finds the blocks that another computed.
        rate_rps: A rate, where no goodput is looked for.
    """

    question: str
    variant: str
    policy: str = "adaptive"
    settings: tuple[tuple[str, Any], ...] = ()
    trace: str = "azure-conversation"
    limit_ms: float | None = 15.0
    order: str = "slack"
    rungs: tuple[int, ...] = ()
    off: float = 1.0
    sees_neighbours: bool = True
    contention: float = 1.0
    spread: float = SPREAD
    reuses: bool = True
    rate_rps: float | None = None

    @property
    def case(self) -> Case:
        """What is replayed."""
        return Case(MODEL, self.trace, self.limit_ms, self.order, self.policy)

    @property
    def cell(self) -> Cell:
        """Its cell, without figures."""
        return self.case.cell(question=self.question, variant=self.variant)

    @property
    def served(self) -> Cell:
        """The cell of its replay on the GPU, without figures."""
        return self.case.cell(question=self.question, variant=self.variant, where="gpu")

    def conditions(self, server: Any) -> AbstractContextManager[None]:
        """What is otherwise of a server, for as long as it serves this."""
        return nullcontext() if self.reuses else forgetful(server)

    def make(self, predictor: Predictor) -> Policy:
        """A new policy that goes by this predictor."""
        kind, given = parsed(self.policy)
        if not self.sees_neighbours:
            predictor = ContentionIgnored(predictor)
        if self.off != 1.0:
            predictor = Scaled(predictor, self.off)
        made: Any = kind
        return made(  # type: ignore[no-any-return]
            predictor=predictor, tbt_slo_ms=self.limit_ms, order=self.order,
            **given | dict(self.settings),
        )  # fmt: skip


class Scaled:
    """Another predictor's times by a factor, and what a neighbour adds by another."""

    def __init__(self, predictor: Predictor, factor: float, contention: float = 1.0) -> None:
        self._predictor = predictor
        self._factor = factor
        self._contention = contention

    def alone_us(self, size: Size, num_sms: int) -> float:
        """The other predictor's, so many times."""
        return self._factor * self._predictor.alone_us(size, num_sms)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """1, and so many times what the other predictor's is above it."""
        slow = self._predictor.slowdown(size, num_sms, beside, beside_sms)
        return 1.0 + self._contention * (slow - 1.0)


@contextmanager
def forgetful(server: Any) -> Iterator[None]:
    """Meanwhile no prompt that this server opens a session for finds another's blocks."""
    opened = server.open

    def open(policy: Policy, *, keep: bool = False) -> Any:
        session = opened(policy, keep=keep)
        prompt = session.prompt
        alone: Trace | None = None

        def own(trace: Trace, number: int) -> Any:
            nonlocal alone
            if alone is None:  # a session serves one trace
                alone = unshared(trace)
            return prompt(alone, number)

        session.prompt = own
        return session

    server.open = open
    try:
        yield
    finally:
        server.open = opened


def unshared(trace: Trace) -> Trace:
    """A trace of the same lengths, none of whose requests has a block of another."""
    return replace(trace, requests=tuple(x._replace(blocks=()) for x in trace.requests))


def _parts() -> list[Ablation]:
    ask = partial(Ablation, "what `adaptive` may do")
    return [
        ask("chunks and splits, as they are"),
        ask("chunks alone", settings=(("modes", ("mixed",)),)),
        ask("splits alone", settings=(("modes", ("split",)),)),
        ask("no late token risked", policy="adaptive:late=0"),
        *(ask(f"one split of {n} SMs: static", policy=f"static_split:{n}") for n in (32, 40, 48)),
    ]


def _predictions() -> list[Ablation]:
    ask = partial(Ablation, "its predictor")
    offs = (0.7, 0.8, 0.9, 0.95, 1.05, 1.1, 1.2, 1.3)
    return [
        ask("as it is"),
        *(ask(f"says {x:g} of the time", off=x) for x in offs),
        *(ask(f"neighbours slow a launch by {x:g} of what it says", contention=x) for x in SLOWER),
        ask("knows no neighbours", sees_neighbours=False),
        ask("is perfect: launches take what it says", spread=0.0),
    ]


def _rungs() -> list[Ablation]:
    ask = partial(Ablation, "rungs of splits")
    return [
        ask("17, from 8 to 112 SMs"),
        ask("eight, as on GPUs", rungs=RUNGS),
        ask("every 8, from 16 to 64", rungs=tuple(range(16, 65, 8))),
        ask("every 16, from 16 to 64", rungs=tuple(range(16, 65, 16))),
        ask("seven on wave edges, from 18 to 62", rungs=WAVE_EDGES),
        ask("32 alone", rungs=(32,)),
    ]


def _steps() -> list[Ablation]:
    ask = partial(Ablation, "decode steps launched ahead, `static_split:40`")
    return [ask(f"{n}", policy=f"static_split:40:steps={n}") for n in (2, 1, 3, 4)]


def _preemption() -> list[Ablation]:
    found = []
    for order in ("fcfs", "slack"):
        ask = partial(
            Ablation, f"MuxWise, Fig. 20: preemption, {order}", trace="sharegpt-like+loogle-like",
            limit_ms=50.0, order=order,
        )  # fmt: skip
        found += [ask("as it is", policy=MUXWISE), ask("none", policy=f"{MUXWISE}:preempt=false")]
    return found


def _groups() -> list[Ablation]:
    ask = partial(
        Ablation, "DRIFT, Fig. 13: groups, the whole device to either side among them",
        policy="drift", limit_ms=30.0,
    )  # fmt: skip
    shares = {4: (24, 36), 3: (30,), 5: (20, 30, 40), 6: (20, 28, 36, 44)}
    return [
        ask(f"{n}", settings=(("groups", tuple(x / 108 for x in of)),)) for n, of in shares.items()
    ]


def _cache() -> list[Ablation]:
    found = []
    for policy in ("adaptive", "chunked:margin=0.08"):
        ask = partial(Ablation, policy=policy, trace="mooncake-conversation", limit_ms=30.0)
        question = f"prefix cache, `{policy}`"
        found += [ask(question, "as it is"), ask(question, "none", reuses=False)]
        question, ask = f"{question}, at {CACHE_RPS:g}/s", partial(ask, rate_rps=CACHE_RPS)
        found += [ask(question, "as it is"), ask(question, "none", reuses=False)]
    return found


def _limits() -> list[Ablation]:
    found = []
    for policy in ("adaptive", "chunked:margin=0.08", "muxwise:margin=0.2", "drift:margin=0.4"):
        question = f"DRIFT, Table 3: no limit, `{policy}`, at {LIMITS_RPS:g}/s"
        ask = partial(Ablation, question, policy=policy, rate_rps=LIMITS_RPS)
        found += [ask("15 ms"), ask("none", limit_ms=None)]
    return found


ABLATIONS: tuple[Ablation, ...] = (
    *_parts(), *_predictions(), *_rungs(), *_steps(), *_preemption(), *_groups(), *_cache(),
    *_limits(),
)  # fmt: skip


def measured(ablation: Ablation, how: How) -> Cell:
    """Its cell: a goodput, or what service is like at its rate."""
    sizes = sizes_of(MODEL, how.gpu, ablation.rungs)
    known = predictor_for(preset(MODEL), how.gpu, sms=())
    meets = Scaled(known, 1.0, ablation.contention) if ablation.contention != 1.0 else known
    server = SimServer(MODEL, gpu=how.gpu, predictor=meets, sizes=sizes, spread=ablation.spread)
    if ablation.rate_rps is not None:
        return at_rate(ablation, how, server)
    with ablation.conditions(server):
        found = goodput_cell(
            ablation.case, how, spec=ablation.policy, server=server,
            make=partial(ablation.make, known),
        )  # fmt: skip
    assert found is not None
    return found | ablation.cell


def at_rate(ablation: Ablation, how: How, server: Server, preheat_s: float = 0.0) -> Cell:
    """What service is like at its rate, simulated or on the GPU."""
    assert ablation.rate_rps is not None
    with ablation.conditions(server):
        found, _ = rate_cell(
            ablation.case, how, ablation.rate_rps, server=server, drain=False, preheat_s=preheat_s
        )
    return found | (ablation.cell if found["simulated"] else ablation.served)


@suite_command(
    "replay-ablations",
    *SEARCH_OPTIONS,
    click.option("--serve", is_flag=True, help="On the GPU, those that are looked at at a rate."),
    *SIMULATED_OPTIONS,
    quick="The first question.",
)
def command(
    output: Output, seeds: int, seconds: float, least: int, serve: bool, gpu: str, jobs: int,
    traces_folder: Path,
) -> None:  # fmt: skip
    """Goodput of Qwen3-8B where something is left out or otherwise, simulated.

    What `Adaptive` may do, what its predictor says, rungs, steps ahead, preemption, groups, the
    prefix cache, no limit. Takes a process some minutes for each dozen of them.
    """
    results = output.open(gpu=None if serve else load_profile(gpu).info.name)
    asked = [x for x in ABLATIONS if x.rate_rps is not None or not serve]
    asked = [x for x in asked if not output.quick or x.question == asked[0].question]
    todo = [x for x in asked if cell_key(x.served if serve else x.cell) not in results.by_key]
    how = How(tuple(range(seeds)), "poisson", seconds, least, folder=traces_folder, gpu=gpu)
    for cell in _served(todo, how) if serve else _simulated(todo, how, jobs):
        results.add(cell)
        results.save(output.path)
        click.echo(f"{cell['case']['question']}, {cell['case']['variant']}: {said(cell)}")
        if output.deadline.passed:
            break


def _simulated(todo: Sequence[Ablation], how: How, jobs: int) -> Iterator[Cell]:
    with processes(jobs) as pool:
        try:
            for done in as_completed([pool.submit(measured, x, how) for x in todo]):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)  # past the deadline what runs ends, and no more


def _served(todo: Sequence[Ablation], how: How) -> Iterator[Cell]:
    from smkern.bench.replay.gpu import open_server

    with open_server(MODEL, say=click.echo) as server:
        for ablation in todo:
            yield at_rate(ablation, how, server, PREHEAT_S)


def said(cell: Cell) -> str:
    """A cell's figure, in a few words."""
    if "goodput_rps" in cell:
        return f"{cell['goodput_rps']:.2f}/s"
    tbt, ttft, kept = cell["tbt_ms"]["p99"], cell["ttft_ms"]["p50"], cell["ttft_kept"]
    return f"TBT p99 {tbt:.1f} ms, TTFT p50 {ttft:.0f} ms, {kept:.1%} in time"
