"""`smkern autotune --op gemm_fp8`: GEMMs of e4m3 with scales of rows and of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smkern.autotune.family import MeasuredFamily, Tasks
from smkern.autotune.gemm import cell_of, likeliest
from smkern.autotune.measure import Tuner, best_cell
from smkern.autotune.raw import Measurement
from smkern.device import Budget
from smkern.kernels.cute.compile import serves
from smkern.limits import check_fp8_capability
from smkern.measure.partitions import Place
from smkern.measure.timing import sets_for
from smkern.models.quantization import Kind
from smkern.ops.fp8.call import ScaledGemm
from smkern.ops.fp8.dispatch import ScaledDispatcher, bind_plan, fp8_dispatcher
from smkern.ops.operator_dispatch import Compile
from smkern.ops.reference.fp8 import dequantize, quantize
from smkern.profile import Profile
from smkern.tuning import fp8, fp8_cutlass
from smkern.tuning.config import GemmConfig
from smkern.tuning.constraints import OPTIONAL, may_serve_extras
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.fp8_table import FP8_FAMILY
from smkern.tuning.table import Cell

MAX_OF_A_TILE = 2
"""Configurations of the same tile and CTAs an SM among the candidates."""
CUTLASS = 4
"""Candidates of CUTLASS's: among the model's 4 best was what took 1.001 of the best of 17."""
BOTH_WAYS = 2
"""Candidates that are measured both overlapping the launch before and apart from it."""


@dataclass(frozen=True, slots=True)
class ScaledCase:
    """A GEMM of e4m3 to measure."""

    problem: ScaledProblem

    @property
    def name(self) -> str:
        p = self.problem
        return f"gemm_fp8-{p.m}x{p.n}x{p.k}-{'block' if p.blocks else 'row'}"

    @property
    def operands(self) -> tuple[int, int, bool]:
        """A weight shape and kind of scales: its operands serve all rows."""
        return self.problem.n, self.problem.k, self.problem.blocks


class ScaledTuner(Tuner[ScaledProblem, GemmConfig]):
    """Measures cells of one weight shape and kind of scales.

    Args:
        cases: What is measured, of the same operands.
        dispatcher: Prepares the launches.
        device: Where it runs.
    """

    name = "gemm_fp8"
    tolerance = 4e-3
    """Of the quantized operands: rounding to bf16 gives 2e-3."""

    def __init__(
        self, cases: Sequence[ScaledCase], dispatcher: ScaledDispatcher, device: str
    ) -> None:
        n, k, blocks = cases[0].operands
        self.dispatcher = dispatcher
        rows = max(case.problem.m for case in cases)
        generator = torch.Generator(device).manual_seed(n * 31 + k)
        a_kind, w_kind = ("block", "weight_block") if blocks else ("token", "token")

        def random(count: int) -> Tensor:
            shape = (count, k)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.a = quantize(random(rows), a_kind)
        self.w = [quantize(random(n), w_kind) for _ in range(sets_for(n * k, most=12))]
        self.out = torch.empty(rows, n, device=device, dtype=torch.bfloat16)
        self.workspace = torch.zeros(0, dtype=torch.uint8, device=device)

    def order(self, problem: ScaledProblem, config: GemmConfig) -> None:
        return None

    def results(self, problem: ScaledProblem) -> Sequence[Tensor]:
        return [self.out[: problem.m]]

    def expected(self, problem: ScaledProblem) -> Sequence[Tensor]:
        a, scale = (x[: problem.m] for x in self.a)
        return [dequantize(a, scale) @ dequantize(*self.w[0]).T]

    def recover(self, problem: ScaledProblem, place: Place) -> None:
        self.workspace.zero_()  # a launch that failed may leave counts behind

    def launches(
        self, problem: ScaledProblem, place: Place, config: GemmConfig
    ) -> Sequence[Callable[[], object]]:
        kernels: Any = self.dispatcher.kernels()
        plan = kernels.prepare(problem, config, place.budget)
        if plan.workspace_bytes > self.workspace.nbytes:
            size = max(plan.workspace_bytes, 64 << 20)
            self.workspace = torch.zeros(size, dtype=torch.uint8, device=self.out.device)
        a, scale = (x[: problem.m] for x in self.a)
        stream = place.stream.cuda_stream
        # each keeps the workspace that it was made with
        kept = self.workspace
        found = []
        for w, w_scale in self.w:
            call = ScaledGemm(a, w, scale, w_scale, static_weights=True)
            launch = bind_plan(plan, call, w, problem.n).launch
            assert launch is not None
            tensors = a, w, scale, w_scale, self.out
            addresses = [x.data_ptr() for x in tensors]
            found.append(partial(_run, launch, addresses, kept, stream))
        return found


def _run(launch: Callable[..., None], addresses: list[int], workspace: Tensor, stream: int) -> None:
    launch(*addresses, 0, 0, workspace.data_ptr(), stream)


def listed(
    problem: ScaledProblem, budget: Budget, profile: Profile, most: int
) -> dict[GemmConfig, float]:
    """The model's best, at most `MAX_OF_A_TILE` of a tile, so that others get a chance, and beside
    them CUTLASS's best where it is there. None off sm_90, where one tile serves all.

    Raises:
        DeviceError: a GPU without e4m3.
    """
    check_fp8_capability(profile.info.sm)
    found: dict[GemmConfig, float] = {}
    if not fp8.serves_ws(problem, profile.info.capability):
        return found
    tiles: Counter[tuple[object, ...]] = Counter()
    for us, config in sorted(fp8.ranked(problem, budget, profile)):
        tile = (config.block_m, config.block_n, config.swap, config.ctas_per_sm)
        if len(found) < most and tiles[tile] < MAX_OF_A_TILE:
            tiles[tile] += 1
            found[config] = us
    if budget.confined == "mask":
        for config in list(found)[:BOTH_WAYS]:
            found.setdefault(replace(config, overlap=not config.overlap), found[config])
    if fp8_cutlass.pays(problem.m) and may_serve_extras(problem, profile.info.capability):
        beside = sorted(fp8.ranked(problem, budget, profile, "cutlass"))
        served = [x for x in beside if serves(profile.info.capability, problem, x[1])]
        found |= {config: us for us, config in served[:CUTLASS]}
    return found


def best(measured: Sequence[Measurement[ScaledProblem, GemmConfig]]) -> Cell | None:
    """The fastest, CUTLASS's only if clearly, and the fastest that needs no extra."""
    others = [x for x in measured if x.config.kernel in OPTIONAL and x.error is None]
    ours = best_cell([x for x in measured if x.config.kernel not in OPTIONAL])
    return None if ours is None else cell_of(ours, likeliest(others))


def case_of(m: int, n: int, k: int, kind: Kind) -> ScaledCase:
    """A product of a model with such weights."""
    return ScaledCase(ScaledProblem(m, n, k, scales="block" if kind == "fp8-block" else "row"))


def cases_of(shapes: Sequence[tuple[int, int]], rows: Sequence[int]) -> list[ScaledCase]:
    """All cases, what shares operands together."""
    kinds: tuple[Kind, ...] = ("fp8-block", "fp8-channel")
    return [case_of(m, n, k, kind) for n, k in shapes for kind in kinds for m in rows]


def _tasks(
    problem: ScaledProblem,
    budget: Budget,
    configs: Sequence[GemmConfig],
    dispatcher: ScaledDispatcher,
) -> Tasks:
    from smkern.kernels.fp8.gemm_compile import variant_of

    made = {variant_of(problem, config, dispatcher.capability) for config in configs}
    return {variant: Compile(variant) for variant in made}


FAMILY = MeasuredFamily(
    tuned=FP8_FAMILY,
    listed=listed,
    dispatcher=fp8_dispatcher,
    tuner=ScaledTuner,
    tasks=_tasks,
    best=best,
    operands=lambda case: case.operands,
)
"""Rows and blocks of scales, whatever the epilogue."""
