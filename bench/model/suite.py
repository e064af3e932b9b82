"""`smkern bench model`: decode steps and prefill of whole models over SM budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.cells import failed_cell, our_head
from smkern.bench.model.cases import (
    PLANS,
    QUICK_PLANS,
    DecodeCase,
    ModelPlan,
    PrefillCase,
    plans_named,
)
from smkern.bench.model.measure import Measurer
from smkern.bench.model.model import Model
from smkern.bench.model.overlap import forbid_overlap
from smkern.bench.model.rows import DECODE, KERNEL, LAUNCH, PREFILL, summarize
from smkern.bench.power import power_meter
from smkern.bench.results import Results
from smkern.bench.rows import Cell, has_cell
from smkern.bench.suite import (
    BUDGETS_OPTION,
    TIME_LIMIT_OPTION,
    Output,
    Run,
    conclude,
    suite_command,
)
from smkern.bench.tables.models import breakdown_table, decode_table, prefill_table
from smkern.device import Budget, device_info
from smkern.latency.model_gemms import problems_of
from smkern.measure.compiling import compile_forwards, precompile
from smkern.measure.options import IntList
from smkern.measure.partitions import Partitions, Place, trim_memory
from smkern.models import ModelConfig
from smkern.profile import load_profile
from smkern.tuning.config import Epilogue

LAUNCH_BUDGETS = (48, 132)
LAUNCH_BATCHES = (1, 64)
BREAKDOWN_BATCHES = (1, 64)


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure: the operator and case of its first cell, where, and how."""

    op: str
    case: DecodeCase | PrefillCase
    place: Place
    measure: Callable[[Measurer], Iterable[Cell]]

    def is_done(self, results: Results) -> bool:
        """Whether the file has its first cell."""
        key = self.op, self.place.num_sms
        cells = (cell for cell in results.cells if (cell["op"], cell["num_sms"]) == key)
        return has_cell(cells, "smkern", self.case.about)

    def failure(self, error: Exception) -> Cell:
        """The cell of a task that raised."""
        return our_head(self.op, self.case.about, self.place) | failed_cell(error)


@dataclass(frozen=True, slots=True)
class Tasks:
    """What a run measures of each model.

    Args:
        overlap: whether kernels may overlap their neighbours; if not, steps alone are measured.
        breakdown: each operator of a step, and nothing else.
        alone: decode steps with nothing beside them, and nothing else.
    """

    partitions: Partitions
    results: Results
    overlap: bool = True
    breakdown: bool = False
    alone: bool = False

    def pending(self, plan: ModelPlan) -> list[Task]:
        """What the file lacks."""
        return [task for task in self.tasks(plan) if not task.is_done(self.results)]

    def tasks(self, plan: ModelPlan) -> Iterator[Task]:
        """All of it. The whole chip's prefill comes before the partitions'."""
        if self.breakdown:
            yield from self._breakdowns(plan)
            return
        yield from self._decodes(plan)
        if self.overlap and not self.alone:
            yield from self._prefills(plan)
            yield from self._launches(plan)

    def _decodes(self, plan: ModelPlan) -> Iterator[Task]:
        total = self.partitions.full.num_sms
        for num_sms in plan.decode_budgets:
            place = self.partitions.at(num_sms)
            if place is None:
                continue
            beside = self.overlap and not self.alone and num_sms < total
            other = self.partitions.at(total - num_sms) if beside else None
            for batch in plan.batches:
                case = DecodeCase(plan.model, batch, overlap=self.overlap)
                yield Task(DECODE, case, place, methodcaller("decode", case, place, other))

    def _prefills(self, plan: ModelPlan) -> Iterator[Task]:
        for num_sms in sorted(plan.prefill_budgets, reverse=True):
            place = self.partitions.at(num_sms)
            if place is None:
                continue
            for case in plan.prompts:
                yield Task(PREFILL, case, place, self._prefill(case, place))

    def _prefill(self, case: PrefillCase, place: Place) -> Callable[[Any], Iterable[Cell]]:
        return lambda measurer: measurer.prefill(case, place, self._chip_per_sm(case))

    def _chip_per_sm(self, case: PrefillCase) -> float | None:
        """TFLOP/s an SM of the whole chip, if this file has it."""
        for cell in self.results.cells:
            if cell["op"] == PREFILL and cell["mode"] == "full" and cell["case"] == case.about:
                return cell.get("tflops_per_sm")
        return None

    def _launches(self, plan: ModelPlan) -> Iterator[Task]:
        for num_sms in LAUNCH_BUDGETS:
            place = self.partitions.at(num_sms)
            for batch in LAUNCH_BATCHES:
                if place is not None and batch in plan.batches and num_sms in plan.decode_budgets:
                    case = DecodeCase(plan.model, batch)
                    yield Task(LAUNCH, case, place, methodcaller("launch", case, place))

    def _breakdowns(self, plan: ModelPlan) -> Iterator[Task]:
        for num_sms in plan.decode_budgets:
            place = self.partitions.at(num_sms)
            for batch in BREAKDOWN_BATCHES:
                if place is not None and batch in plan.batches:
                    case = DecodeCase(plan.model, batch, overlap=self.overlap)
                    yield Task(KERNEL, case, place, methodcaller("breakdown", case, place))


def budgets_of(plans: Iterable[ModelPlan], total: int) -> set[int]:
    """Every budget of the plans, and what a decode budget leaves to a prompt."""
    counts: set[int] = set()
    for plan in plans:
        counts |= {*plan.prefill_budgets, *plan.decode_budgets}
        counts |= {total - n for n in plan.decode_budgets if n < total}
    return {n for n in counts if n <= total}


def compile_gemms(
    config: ModelConfig, plan: ModelPlan, steps: Sequence[Budget], prompts: Sequence[Budget]
) -> int:
    """Compile the GEMMs of decode steps in some budgets, and of the prompt in others; how many.

    The prompt's without their epilogues too: they are timed by themselves.
    """
    decode = [(batch, batch) for batch in plan.batches]
    forwards = [(decode, steps), ([(plan.tokens, x.batch) for x in plan.prompts], prompts)]
    plain = {replace(x, epilogue=Epilogue()) for x in problems_of(config, plan.tokens, 1)}
    alone = ((problem, budget, None) for problem in plain for budget in prompts)
    return compile_forwards(config, forwards) + precompile(alone)


def run(
    plans: Sequence[ModelPlan], results: Results, output: Output, *, rounds: int, **kinds: bool
) -> int:
    """Measure what `results` lacks, one model on the device at a time; how many tasks are left.

    Args:
        rounds: windows in which a step alone is timed.
        kinds: see `Tasks`.
    """
    total = device_info().num_sms
    wanted = budgets_of(plans, total)
    with Partitions(wanted, placements=("spread",)) as partitions, Progress() as progress:
        tasks = Tasks(partitions, results, **kinds)
        profile, meter = load_profile(), power_meter()

        def measurer(plan: ModelPlan) -> Measurer:
            model = Model(plan)
            others = [total - n for n in plan.decode_budgets if n < total]
            steps, prompts = (
                [at.budget for n in dict.fromkeys(counts) if (at := partitions.at(n)) is not None]
                for counts in (plan.decode_budgets, (*plan.prefill_budgets, *others))
            )
            compile_gemms(model.config, plan, steps, prompts)
            return Measurer(model, profile, meter, rounds)

        def items(left: Mapping[ModelPlan, list[Task]]) -> Iterator[tuple[Task, Measurer]]:
            for plan, pending in left.items():
                if pending:
                    made = measurer(plan)
                    for task in pending:
                        yield task, made
                    del made
                    trim_memory(0)

        def measure(item: tuple[Task, Measurer]) -> Iterator[Cell]:
            task, made = item
            try:
                yield from task.measure(made)
            except Exception as error:  # noqa: BLE001  one failed task is a cell, not the end
                progress.console.print(f"{task.op} {task.case}: {error}", markup=False)
                yield task.failure(error)

        left = {plan: tasks.pending(plan) for plan in plans}
        run = Run(results, output, summarize, progress)
        run.through(items(left), measure, sum(map(len, left.values())))
        return sum(len(tasks.pending(plan)) for plan in plans)


@suite_command(
    "model",
    click.option("--models", default=None, help="Presets: qwen3-8b,qwen3-8b-fp8+fp8-kv"),
    click.option("--batches", type=IntList(), default=None, help="Decode batches: 1,64"),
    BUDGETS_OPTION,
    TIME_LIMIT_OPTION,
    click.option(
        "--overlap/--no-overlap", default=True, help="Whether kernels may overlap their neighbours."
    ),
    click.option("--alone", is_flag=True, help="Decode steps only, with nothing beside them."),
    click.option("--breakdown", is_flag=True, help="Instead, time each operator of a decode step."),
    quick="Two batches of one model in two budgets.",
)
def command(
    output: Output,
    *,
    models: str | None,
    batches: Any,
    budgets: Any,
    overlap: bool,
    alone: bool,
    breakdown: bool,
) -> None:
    """Time decode steps and prompts of whole models in SM partitions and on the whole chip.

    Decode steps alone against the floor of their kernels, and beside a prompt on the other SMs,
    both sides reported; prompts alone against their GEMMs by themselves; the host's cost of a
    layer. Steps whose kernels do not overlap, the breakdown, and steps alone in any budgets (from
    16 to 64 SMs by twos, say) are runs of their own that add to the file: --no-overlap,
    --breakdown, --alone --budgets 16-64:2.
    """
    plans = plans_named(models) if models else (QUICK_PLANS if output.quick else PLANS)
    if batches:
        plans = tuple(replace(plan, batches=tuple(batches)) for plan in plans)
    if budgets:
        plans = tuple(
            replace(plan, decode_budgets=budgets) if alone else plan.within(budgets)
            for plan in plans
        )
    # they add to what the first run left
    results = output.open(resume=breakdown or alone or not overlap)
    if not overlap:
        forbid_overlap()
    rounds = 1 if output.quick else 3
    kinds = {"overlap": overlap, "breakdown": breakdown, "alone": alone}
    left = run(plans, results, output, rounds=rounds, **kinds)
    for table in (breakdown_table,) if breakdown else (decode_table, prefill_table):
        click.echo(table(results.cells) + "\n")
    conclude(results, output.path, left, of="tasks")
