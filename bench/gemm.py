"""`smkern bench gemm`: our GEMM and cuBLAS over shapes, rows and SM budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rich.progress import Progress

from smkern.bench.cases import Group, there
from smkern.bench.frame import GroupSuite
from smkern.bench.gemm_providers import OUR_BACKENDS, GemmBench, GemmCase
from smkern.bench.gemm_rows import WORST_TARGET, is_losing, summarize
from smkern.bench.rows import Cell
from smkern.bench.suite import (
    AGAIN_OPTION,
    GEMM_OPTIONS,
    TIME_LIMIT_OPTION,
    Output,
    conclude,
    suite_command,
)
from smkern.measure.compiling import compile_configs, dispatcher_of
from smkern.measure.gemm import BUDGETS, MS, SHAPES, Shape
from smkern.measure.partitions import Partitions, Place
from smkern.tuning.config import GemmConfig, GemmProblem

GemmGroup = Group[GemmCase]

STREAMING_SHAPE: Shape = (28672, 4096)
STREAMING_MS = (1, 8, 16, 32, 64)
STREAMING_BUDGETS = (24,)
"""Measured in addition: decode sizes on the widest weight, where bandwidth bends."""
QUICK_SHAPES = ((6144, 4096),)
QUICK_MS = (64, 2048)
QUICK_BUDGETS = (16, 60, 116)


def gemm_groups(
    shapes: Sequence[Shape] = SHAPES,
    ms: Sequence[int] = MS,
    budgets: Sequence[int] = BUDGETS,
    *,
    streaming: bool = False,
    op: str = "gemm",
) -> list[GemmGroup]:
    """All groups, a shape after the other, so that its operands are made once.

    `streaming` adds `STREAMING_BUDGETS` for the decode sizes of `STREAMING_SHAPE`.
    """

    def budgets_of(shape: Shape, m: int) -> list[int]:
        extra = streaming and shape == STREAMING_SHAPE and m in STREAMING_MS
        return sorted({*budgets, *(STREAMING_BUDGETS if extra else ())})

    return [
        Group(GemmCase(m, n, k, op), num_sms)
        for n, k in shapes
        for m in ms
        for num_sms in budgets_of((n, k), m)
    ]


@dataclass(frozen=True, slots=True)
class GemmChoice:
    """Who takes part in a suite of GEMMs.

    Args:
        backends: our providers, by the `backend` of `smkern.gemm`.
        peers: whether cuBLAS takes part.
        context: with cuBLAS on the whole chip, and our kernel told a wrong budget.
        before: called with a shape before what it launches is chosen.
        bench: makes a bench of a shape's cases and these choices.
    """

    backends: Mapping[str, str | None] = field(default_factory=lambda: OUR_BACKENDS)
    peers: bool = True
    context: bool = True
    before: Callable[[Shape], None] | None = None
    bench: Callable[..., GemmBench] = GemmBench.of

    def build(self, cases: Sequence[GemmCase]) -> GemmBench:
        self._choose_for(cases[0].shape)
        return self.bench(
            cases, backends=self.backends, with_peers=self.peers, with_context=self.context
        )

    def compile(
        self, groups: Sequence[GemmGroup], partitions: Partitions, progress: Progress
    ) -> None:
        """Compile in parallel what the groups will launch."""
        dispatcher = dispatcher_of()
        configs: dict[tuple[GemmProblem, GemmConfig], None] = {}
        for shape, members in groupby(groups, key=lambda group: group.case.shape):
            self._choose_for(shape)
            for group in members:
                problem = group.case.problem
                for where, backend in self._launches(group, partitions):
                    chosen = dispatcher.select(problem, where.budget, backend)
                    configs[problem, chosen.config] = None
        bar = progress.add_task("compile", total=None)
        compile_configs(
            configs,
            done=lambda done, total: progress.update(bar, completed=done, total=total),
        )

    def _launches(
        self, group: GemmGroup, partitions: Partitions
    ) -> Iterator[tuple[Place, str | None]]:
        """Where our kernels run, and by which `backend`."""
        if self.context:
            yield partitions.full, "own"
        if (place := partitions.at(group.num_sms)) is not None:
            for backend in self.backends.values():
                yield place, backend

    def _choose_for(self, shape: Shape) -> None:
        if self.before is not None:
            self.before(shape)

    def suite(
        self,
        summarize: Callable[[Sequence[Cell]], dict[str, Any]] = summarize,
        limits: Mapping[str, float] = WORST_TARGET,
    ) -> GroupSuite[GemmCase]:
        """`limits`: by provider, the ratio to cuBLAS under which a cell lost."""
        return GroupSuite(
            self.build,
            summarize,
            is_losing=lambda cell: is_losing(cell, limits),
            shares=lambda case: case.shape,
            prepare=self.compile,
        )


@suite_command("gemm", *GEMM_OPTIONS, TIME_LIMIT_OPTION, AGAIN_OPTION)
def command(output: Output, *, shapes: Any, ms: Any, budgets: Any, again: bool) -> None:
    """Time smkern.gemm and cuBLAS in SM partitions and on the whole chip.

    Each cell: smkern as dispatched, by its own kernels, by the cost model alone; cuBLAS in the
    spread and the default partition and on the whole chip; our kernel told the wrong budget.
    """
    quick = output.quick
    groups = gemm_groups(
        shapes or (QUICK_SHAPES if quick else SHAPES),
        ms or (QUICK_MS if quick else MS),
        budgets or there(QUICK_BUDGETS if quick else BUDGETS),
        streaming=not (quick or budgets),
    )
    results = output.open()
    conclude(results, output.path, GemmChoice().suite().run(groups, results, output, again=again))
