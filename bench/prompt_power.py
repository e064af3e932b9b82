"""`smkern bench power`: what configurations of prompts' products draw, and what decode beside each
of them takes.

Prompts on most SMs run the chip into its power limit, where its clock falls for both sides. Of two
configurations that are equally fast there, one may leave decode more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import click
from rich.progress import Progress

from smkern.autotune.gemm import GemmTuner, listed
from smkern.autotune.raw import GemmMeasurement
from smkern.bench.cells import cell_head
from smkern.bench.gemm_providers import describe
from smkern.bench.power import Watts, energy_counter
from smkern.bench.prompt_power_rows import Reading, figures, summarize
from smkern.bench.rows import Cell, has_cell
from smkern.bench.suite import (
    BUDGETS_OPTION,
    TIME_LIMIT_OPTION,
    Output,
    Run,
    conclude,
    suite_command,
)
from smkern.device import device_info
from smkern.latency.model_gemms import problems_of
from smkern.measure.busy import Turns, measure
from smkern.measure.compiling import compile_configs, dispatcher_of, settled_problem
from smkern.measure.gemm import GemmOperands
from smkern.measure.launches import ModelLaunches
from smkern.measure.options import IntList
from smkern.measure.partitions import Place
from smkern.measure.profile_command import open_launches
from smkern.measure.sm_clock import Clock, DeviceClock
from smkern.measure.timing import Case, calls_for, capture
from smkern.models import ModelConfig, preset
from smkern.runtime.device import Work
from smkern.runtime.place import Lane
from smkern.runtime.place import Place as Side
from smkern.tuning import constraints
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem

MODEL = "qwen3-8b"
LAYERS = 4
"""Of the decode step beside the products, which has the model's head too."""
BATCH, CONTEXT = 64, 2048
TOKENS = (4096,)
BUDGETS = (100, 116, 84)
QUICK_BUDGETS = (100,)
MOST = 5
"""Configurations of a product that are measured at length."""
WITHIN = 1.08
"""How much slower than the fastest they may be by the tuner's way of timing."""
TURN_US = 5_000.0
SETTLE_S, SECONDS, TURNS = 0.15, 0.5, 6
"""The counter of energy moves every 90 ms; by readings of 0.25 s decode varied by 5%."""
HEAT_S = 0.6
"""Before the first configuration of a product: after 0.4 s a clock was still at 1,660 MHz."""
PASSES = 3
"""Beside decode, there and back and there."""
CLOCK_EVERY = 8
"""Looks at the counter of energy for each reading of the clock."""


def kind(config: GemmConfig) -> tuple[object, ...]:
    """What decides how much a configuration draws: the kernel, its tile, whether K is split.

    CUTLASS's tiles come in steps of 8 columns and are one kind.
    """
    columns = 0 if config.kernel == "cutlass" else config.block_n
    whole = config.split == 1
    return config.kernel, config.block_m, columns, config.swap, config.ctas_per_sm, whole


def finalists(
    found: Iterable[GemmMeasurement], dispatched: GemmConfig, most: int = MOST
) -> list[GemmMeasurement]:
    """What dispatch takes, and of each other kind the fastest that is `WITHIN` the best."""
    fine = sorted((x for x in found if x.error is None), key=lambda x: x.us)
    kept = {kind(x.config): x for x in fine if x.config == dispatched}
    for item in fine:
        if len(kept) < most and item.us <= WITHIN * fine[0].us:
            kept.setdefault(kind(item.config), item)
    return sorted(kept.values(), key=lambda x: x.us)


@dataclass(frozen=True, slots=True)
class Item:
    """A product of prompts.

    Attributes:
        problem: The product.
        num_sms: SMs of the prompts.
        decode: Whether decode steps run on the others.
    """

    problem: GemmProblem
    num_sms: int
    decode: bool


@dataclass(frozen=True, slots=True)
class Captured:
    """A configuration's launches as a graph of some ms."""

    measured: GemmMeasurement
    graph: Any
    calls: int


@dataclass(slots=True)
class PowerBench:
    """Products of prompts on one side of a split, decode steps on the other.

    Args:
        launches: The model whose decode steps run.
        watts: What the GPU draws.
        clock_on: Makes a clock of a stream.
    """

    launches: ModelLaunches
    watts: Watts
    clock_on: Callable[[Any], Clock] = DeviceClock
    _finalists: dict[tuple[GemmProblem, int], list[GemmMeasurement]] = field(default_factory=dict)
    _clocks: dict[int, Clock] = field(default_factory=dict)
    _decode: Work | None = None

    def read(
        self, rung: int, product: Captured | None, *, decode: bool, settle_s: float | None = None
    ) -> Reading:
        """The steady state of a product, of decode steps, or of both beside each other."""
        lanes = []
        if product is not None:
            work = Work("prefill", lambda _: product.graph.replay())
            lanes.append(Turns("prefill", self._side("prefill", rung), [work], depth=3))
        if decode:
            side = self._side("decode", rung)
            lanes.append(Turns("decode", side, [self._decode_step(side)], depth=3))
        clock, looks = self._clock(rung), 0
        self.watts.start()

        def watch() -> None:
            nonlocal looks
            self.watts.tick()
            if looks % CLOCK_EVERY == 0:
                clock.read()
            looks += 1

        found = measure(
            self.launches.device, lanes, seconds=SECONDS, turns=TURNS, watch=watch,
            settle_s=SETTLE_S if settle_s is None else settle_s,
        )  # fmt: skip
        us = None if product is None else found[0].us / product.calls
        decode_us = found[-1].us if decode else None
        return Reading(us, decode_us, clock.mhz(), self.watts.watts)

    def product(self, item: Item, wanted: Mapping[GemmConfig, float]) -> Iterator[Cell]:
        """A cell a configuration."""
        problem, rung = item.problem, self.launches.device.num_sms - item.num_sms
        place, dispatcher = self.place("prefill", rung), dispatcher_of()
        dispatched = dispatcher.select(problem, place.budget).config
        operands = GemmOperands(problem.n, problem.k, problem.m)
        tuner = GemmTuner(dispatcher, operands)
        key = problem, item.num_sms
        if key not in self._finalists:
            self._finalists[key] = finalists(tuner.measure(problem, place, wanted), dispatched)
        products = [_captured(tuner, place, each) for each in self._finalists[key]]
        try:
            readings = self._by_turns(rung, products, item.decode)
            for each, found in zip(products, readings, strict=True):
                yield product_cell(each, place, found, dispatched, item.decode)
        finally:
            self.launches.device.synchronize()
            for each in reversed(products):
                each.graph.reset()

    def _by_turns(
        self, rung: int, products: Sequence[Captured], decode: bool
    ) -> list[list[Reading]]:
        """Readings of each product, one after another and then back again, so that drift shows."""
        found: list[list[Reading]] = [[] for _ in products]
        self.read(rung, products[0], decode=decode, settle_s=HEAT_S)
        for number in range(PASSES if decode else 1):
            for i in range(len(products))[:: -1 if number % 2 else 1]:
                found[i].append(self.read(rung, products[i], decode=decode))
        return found

    def decode_alone(self, rung: int) -> Cell:
        """The decode step with nothing beside it."""
        case = {"model": MODEL, "layers": LAYERS, "batch": BATCH, "context": CONTEXT}
        reading = self.read(rung, None, decode=True)
        return cell_head("decode_step", case, self.place("decode", rung), "smkern") | figures(
            [reading]
        )

    def place(self, lane: Lane, rung: int) -> Place:
        """A side of a split, as the tuner takes it."""
        partition = self.launches.device.partition(self._side(lane, rung))
        assert partition is not None
        return Place(partition.budget, partition.stream, "spread", partition)

    def _side(self, lane: Lane, rung: int) -> Side:
        return Side.of(lane, rung, self.launches.device.num_sms)

    def _decode_step(self, side: Side) -> Work:
        lengths = [CONTEXT] * BATCH
        self.launches.capture(side, lengths)
        if self._decode is None:
            self._decode = self.launches.decode(lengths)
        return self._decode

    def _clock(self, rung: int) -> Clock:
        if rung not in self._clocks:
            self._clocks[rung] = self.clock_on(self.place("decode", rung).stream)
        return self._clocks[rung]


def _captured(tuner: GemmTuner, place: Place, item: GemmMeasurement) -> Captured:
    calls = calls_for(item.us, target_us=TURN_US)
    call = tuner.call(item.problem, place, item.config)
    return Captured(item, capture(Case(call, place.stream, calls)), calls)


def product_cell(
    product: Captured,
    place: Place,
    readings: Sequence[Reading],
    dispatched: GemmConfig,
    decode: bool,
) -> Cell:
    """What a configuration took, and what beside it took. `tuned_us`: by the tuner's short rounds,
    alone and before the clock falls."""
    item = product.measured
    problem = item.problem
    case: Cell = {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype}
    case |= {"epilogue": problem.epilogue.key, "config": describe(item.config)}
    case["beside"] = "decode" if decode else None
    found = figures(readings, problem.m)
    return cell_head("gemm", case, place, "smkern") | found | {
        "tflops": round(problem.flops / found["us"] / 1e6, 1),
        "tuned_us": round(item.us, 3),
        "dispatched": item.config == dispatched,
    }  # fmt: skip


Wanted = dict[Item, dict[GemmConfig, float]]


def candidates(config: ModelConfig, items: Sequence[Item], bench: PowerBench) -> Wanted:
    """The tuner's candidates of each product; compiles them, and what decode steps launch."""
    dispatcher, total = dispatcher_of(), bench.launches.device.num_sms
    found: Wanted = {}
    compiled: dict[tuple[GemmProblem, GemmConfig], None] = {}
    for item in items:
        problem, budget = item.problem, bench.place("prefill", total - item.num_sms).budget
        wanted = listed(problem, budget, dispatcher.profile)
        choice = dispatcher.select(problem, budget)
        wanted.setdefault(choice.config, choice.predicted_us)
        found[item] = wanted
        compiled |= dict.fromkeys((problem, x) for x in wanted)
        if constraints.UNFUSED in wanted:
            plain = replace(problem, epilogue=Epilogue())
            compiled[plain, dispatcher.select(plain, budget).config] = None
    for rung in {total - item.num_sms for item in items}:
        budget = bench.place("decode", rung).budget
        for problem in problems_of(config, BATCH, BATCH):
            problem = settled_problem(problem, budget)
            compiled[problem, dispatcher.select(problem, budget).config] = None
    count = compile_configs(compiled)
    click.echo(f"{count} variants compiled")
    return found


def items_of(config: ModelConfig, tokens: Sequence[int], budgets: Sequence[int]) -> list[Item]:
    """Each product of a forward of so many tokens on so many SMs, beside decode steps first."""
    return [
        Item(problem, num_sms, decode)
        for decode in (True, False)
        for num_sms in budgets
        for count in tokens
        for problem in problems_of(config, count, BATCH)
        if problem.m == count  # the head's rows are requests
    ]


def is_measured(cells: Sequence[Cell], item: Item) -> bool:
    """Whether cells of a product are there."""
    problem = item.problem
    case = {"m": problem.m, "n": problem.n, "k": problem.k, "epilogue": problem.epilogue.key}
    case["beside"] = "decode" if item.decode else None
    return has_cell([x for x in cells if x["num_sms"] == item.num_sms], "smkern", case)


@suite_command(
    "power",
    click.option("--ms", type=IntList(), default=None, help="Tokens of the prompts."),
    BUDGETS_OPTION,
    TIME_LIMIT_OPTION,
    quick="One budget: a minute and a half of GPU time.",
)
def command(output: Output, *, ms: Any, budgets: Any) -> None:
    """Time the products of prompts in several configurations, beside decode steps and alone.

    Each runs until power has settled; clock, power and energy are read meanwhile. --budgets are the
    prompts' SMs; decode has the others.
    """
    total = device_info().num_sms
    config = replace(preset(MODEL), num_layers=LAYERS)
    items = items_of(config, ms or TOKENS, budgets or (QUICK_BUDGETS if output.quick else BUDGETS))
    results = output.open()
    items = [item for item in items if not is_measured(results.cells, item)]
    if not items:
        conclude(results, output.path, 0, of="products")
        return
    rungs = sorted({total - item.num_sms for item in items})
    with open_launches(config, rungs) as (launches, _):
        bench = PowerBench(launches, Watts(energy_counter(0)))
        wanted = candidates(config, items, bench)
        for rung in rungs:
            results.add(bench.decode_alone(rung))
        with Progress() as progress:
            run = Run(results, output, summarize, progress)
            run.through(items, lambda item: bench.product(item, wanted[item]), len(items))
    left = sum(not is_measured(results.cells, item) for item in items)
    conclude(results, output.path, left, of="products")
