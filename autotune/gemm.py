"""The GEMM's family: its candidates, its tuner, and the rule by which a cell is won."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from smkern.autotune.family import MeasuredFamily, Tasks
from smkern.autotune.measure import Tuner
from smkern.autotune.raw import GemmMeasurement, Measurement
from smkern.autotune.shortlist import shortlist
from smkern.device import Budget, DeviceInfo
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Place
from smkern.ops.gemm.dispatch import Dispatcher, gemm_dispatcher
from smkern.profile import Profile, profile_for
from smkern.tuning import constraints
from smkern.tuning.cells import Tuned
from smkern.tuning.config import Dtype, Epilogue, GemmConfig, GemmProblem, Kernel
from smkern.tuning.cost_constants import load_constants
from smkern.tuning.cost_model import predict_us
from smkern.tuning.select import GEMM_FAMILY
from smkern.tuning.table import Cell, Table

SAME_WITHIN = 1.02
"""Times so close are one: power and clocks move more than that between runs. Of the tiles in it the
larger ones read less, and stay ahead where prompts keep the device at its power limit."""
SPLIT_MUST_GAIN = 1.04
OTHERS_MUST_GAIN = 1.01
"""cuBLASLt wins a cell only by more: its kernels need clusters and may change with versions. So
does SwiGLU unfused: it costs a second launch, the host's time and memory. And CUTLASS, which is not
everywhere."""
KERNELS = constraints.AVAILABLE + constraints.OPTIONAL
Timed = Measurement[Any, GemmConfig] | Tuned[GemmConfig]
M = TypeVar("M", bound=Measurement[Any, GemmConfig])
DTYPES: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class GemmCase:
    """A GEMM to measure."""

    problem: GemmProblem

    @property
    def name(self) -> str:
        p = self.problem
        return f"gemm-{p.m}x{p.n}x{p.k}-{p.epilogue.key}"

    @property
    def operands(self) -> tuple[int, int, Dtype]:
        """A weight shape: its operands serve all rows and epilogues."""
        return self.problem.n, self.problem.k, self.problem.dtype


@dataclass(slots=True)
class GemmTuner(Tuner[GemmProblem, GemmConfig]):
    """Measures cells of one weight shape on one device.

    Args:
        dispatcher: prepares the launches.
        operands: rotated sets of a, w and out, together past L2.
        static_weights: a model's weights stay as they are: launches overlap as they do there.
    """

    dispatcher: Dispatcher
    operands: GemmOperands
    static_weights: bool = True
    name: str = "gemm"
    tolerance: float = 2e-2
    """bf16 rounding alone gives 2e-3, a wrong tile far more."""
    _extras: dict[str, Tensor] = field(default_factory=dict)
    _workspaces: list[Tensor] = field(default_factory=list)

    def order(self, problem: GemmProblem, config: GemmConfig) -> Hashable:
        return None

    def results(self, problem: GemmProblem) -> Sequence[Tensor]:
        return [self.operands.out(problem.m, 0)[:, : problem.out_columns]]

    def expected(self, problem: GemmProblem) -> Sequence[Tensor]:
        """The result of set 0 by torch, [m, n] (SwiGLU [m, n / 2]) in the operands' dtype."""
        ops = self.operands
        value = ops.a(problem.m, 0) @ ops.w(0).t()
        if problem.epilogue.swiglu:
            gate, up = value.chunk(2, dim=1)
            return [torch.nn.functional.silu(gate).mul_(up)]
        bias, residual = self._epilogue_operands(problem)
        if bias is not None:
            value = value + bias
        if problem.epilogue.activation is not None:
            value = getattr(torch.nn.functional, problem.epilogue.activation)(value)
        return [value if residual is None else value + residual]

    def launches(
        self, problem: GemmProblem, place: Place, config: GemmConfig
    ) -> Sequence[Callable[[], object]]:
        plan = self.dispatcher.prepare(problem, config, place.budget)
        workspace, stream = self._workspace_of(plan.workspace_bytes), place.stream.cuda_stream
        bias, residual = self._epilogue_operands(problem)
        sets = self.operands.sets(problem.m)
        extras = [0 if x is None else x.data_ptr() for x in (bias, residual)]
        a, w, out = sets[0]
        residual_stride = problem.n if residual is not None else 0
        strides = a.stride(0), w.stride(0), out.stride(0), residual_stride
        launch = plan.bind(*strides, static_weights=self.static_weights)
        return [
            partial(launch, *(x.data_ptr() for x in tensors), *extras, workspace, stream)
            for tensors in sets
        ]

    def _epilogue_operands(self, problem: GemmProblem) -> tuple[Tensor | None, Tensor | None]:
        """bias [n] and residual [m, n], where the epilogue has them."""
        epilogue, ops = problem.epilogue, self.operands
        bias = residual = None
        if epilogue.bias:
            bias = self._extra("bias", 1, ops.n)[0]
        if epilogue.residual:
            residual = self._extra("residual", ops.max_m, ops.n)[: problem.m]
        return bias, residual

    def _extra(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self._extras:
            dtype, device = self.operands.dtype, self.operands.device
            self._extras[name] = torch.randn(rows, columns, dtype=dtype, device=device)
        return self._extras[name]

    def _workspace_of(self, num_bytes: int) -> int:
        """Zeroed afresh: a candidate that failed may have left counts behind."""
        if not num_bytes:
            return 0
        if not self._workspaces or self._workspaces[-1].nbytes < num_bytes:
            size = max(num_bytes, 64 << 20)
            # the smaller ones stay: calls that were made before have their addresses
            made = torch.zeros(size, dtype=torch.uint8, device=self.operands.device)
            self._workspaces.append(made)
        workspace = self._workspaces[-1]
        workspace[: 64 << 10].zero_()
        torch.cuda.synchronize()
        return workspace.data_ptr()


def _handicapped_us(item: Timed) -> float:
    others = constraints.LIBRARIES + constraints.OPTIONAL
    return item.us * (OTHERS_MUST_GAIN if item.config.kernel in others else 1)


def likeliest(found: Sequence[M]) -> list[M]:
    """The fastest, or of those within the measurement's noise of it the likeliest to stay so; of
    none none.

    A split K loop must gain more than that over the best whole one: partial sums cost L2 traffic
    and power, which weigh more on another day. Then the model's favourite.
    """
    if not found:
        return []
    whole = [item for item in found if item.config.split == 1]
    fastest = min(item.us for item in found)
    if whole and min(item.us for item in whole) <= SPLIT_MUST_GAIN * fastest:
        found, fastest = whole, min(item.us for item in whole)
    same = [item for item in found if item.us <= SAME_WITHIN * fastest]
    return [min(same, key=lambda item: (item.predicted_us, item.us))]


def best_cell(measurements: Sequence[GemmMeasurement]) -> Cell | None:
    """The cell that these measurements make; None where none of our kernels ran."""
    fine = [item for item in measurements if item.error is None]

    def of(kernels: Collection[Kernel]) -> list[GemmMeasurement]:
        return [item for item in fine if item.config.kernel in kernels]

    own, extras = likeliest(of(constraints.AVAILABLE)), likeliest(of(constraints.OPTIONAL))
    return cell_of(own[0], [*of(constraints.LIBRARIES), *extras]) if own else None


def cell_of(ours: Timed, others: Iterable[Timed]) -> Cell:
    """Won by our own fastest, or by one of the others that gains what it must."""
    best = min([ours, *others], key=_handicapped_us)
    return Cell(best.config, best.us, ours.config, ours.us)


def listed(
    problem: GemmProblem, budget: Budget, profile: Profile, most: int = 8
) -> dict[GemmConfig, float]:
    """The model's best, and for an epilogue what the GPU's table runs today: mostly the plain
    GEMM's."""
    constants = load_constants(profile.info.name, profile.info.capability)
    from smkern.kernels.cute.compile import serves

    served = partial(serves, profile.info.capability)
    found = shortlist(problem, budget, profile, constants, top=most, served=served)
    if problem.epilogue != Epilogue():
        table = _table_of(profile.info)
        today = table.lookup(problem, budget, False, profile.info.capability)
        if today is not None and today.kernel in KERNELS and today not in found:
            found[today] = predict_us(problem, today, budget, profile, constants)
    return found


@cache
def _table_of(info: DeviceInfo) -> Table:
    """As it was when the command began: what it adds meanwhile has been measured."""
    return GEMM_FAMILY.load(profile_for(info))


def _tuner(cases: Sequence[GemmCase], dispatcher: Dispatcher, device: str) -> GemmTuner:
    n, k, dtype = cases[0].operands
    rows = max(case.problem.m for case in cases)
    return GemmTuner(dispatcher, GemmOperands(n, k, rows, DTYPES[dtype], device))


def _tasks(
    problem: GemmProblem, budget: Budget, configs: Sequence[GemmConfig], dispatcher: Dispatcher
) -> Tasks:
    """The candidates' variants; one that does not compile is named where it is measured."""
    from smkern.kernels.gemm_compile import compile_variant
    from smkern.kernels.gemm_variants import variant_of

    major, minor = dispatcher.profile.info.capability
    launched = [(problem, config) for config in configs]
    if constraints.UNFUSED in configs:  # launches the plain GEMM, as dispatch chooses it
        plain = replace(problem, epilogue=Epilogue())
        launched.append((plain, dispatcher.select(plain, budget).config))
    variants = {
        variant_of(x, config, 10 * major + minor)
        for x, config in launched
        if config.kernel not in constraints.LIBRARIES
    }
    return {variant: partial(compile_variant, variant) for variant in variants}


FAMILY = MeasuredFamily(
    tuned=GEMM_FAMILY,
    listed=listed,
    dispatcher=gemm_dispatcher,
    tuner=_tuner,
    tasks=_tasks,
    best=best_cell,
    operands=lambda case: case.operands,
    most=8,
)
