"""A device that is not there: CPU tensors stand for its memory, a fake kernel does the work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from smkern.ops.gemm.call import Gemm
from smkern.ops.gemm.dispatch import Dispatcher
from smkern.ops.gemm.operator import GEMM
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.reference import gemm as reference
from smkern.ops.reference import swiglu
from smkern.ops.streams import Streams
from smkern.ops.swiglu.operator import GEMM_SWIGLU, Swiglu
from smkern.ops.workspace import Workspaces
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.table import CellKey
from tests import gpus

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class FakeProfile:
    """A GPU of 132 SMs with the published figures of an H200."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.info = replace(gpus.H200, name="NVIDIA Fake", capability=capability)

    def bandwidth(self, num_sms: int, **_: Any) -> float:
        return min(0.2 * num_sms, 4.4)

    def flops(self, num_sms: int, **_: Any) -> float:
        return min(8.1 * num_sms, 790.0)


def streams_of(device: Any) -> Streams:
    """A double's streams, a number each: `stream` is current, `budgets` says what each has."""
    return Streams(
        lambda: -1,
        lambda index: device.stream,
        lambda raw, index: device.budgets[raw],
        lambda: device.is_capturing,
    )


def memory(
    pointer: int, shape: Any, strides: Any, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The tensor at an address, as a kernel sees it."""
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (dtype.itemsize * count)).from_address(pointer)
    whole = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    return whole.as_strided(tuple(shape), tuple(strides))


class FakeTable:
    """A tuned table that answers by `found(problem, budget, allow_cublaslt)`."""

    def __init__(self, found: Callable[[Any, Any, bool], Any], *cells: Any) -> None:
        self.found, self.cells = found, dict.fromkeys(cells)

    def neighbours(self, problem: Any, budget: Any) -> tuple[()]:
        return ()

    def has(self, problem: Any, budget: Any) -> bool:
        return CellKey.of(problem, budget) in self.cells

    def library_us(self, problem, budget, config) -> float | None:
        return None

    def lookup(self, problem, budget, allow_cublaslt=True, capability=None, served=None) -> Any:
        return self.found(problem, budget, allow_cublaslt)


def view(pointer: int, rows: int, cols: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """The [rows, cols] matrix at an address."""
    return memory(pointer, (rows, cols), (stride, 1), dtype)


@dataclass
class FakePlan:
    """Works on raw addresses, like a kernel; splits leave their mark in the counters' neighbour."""

    problem: GemmProblem
    config: GemmConfig
    budget: Budget
    workspace_bytes: int
    launches: list[tuple[int, ...]] = field(default_factory=list)
    static_weights: list[bool] = field(default_factory=list)

    def launch(
        self, a: int, w: int, out: int, bias: int, residual: int, a_stride: int, w_stride: int,
        out_stride: int, residual_stride: int, workspace: int, stream: int,
    ) -> None:  # fmt: skip
        p, dtype = self.problem, DTYPES[self.problem.dtype]
        self.launches.append((workspace, stream))
        result = view(out, p.m, p.out_columns, out_stride, dtype)
        if p.epilogue.swiglu:
            weights = view(w, p.n, p.k, w_stride, dtype)
            swiglu.gemm_swiglu(view(a, p.m, p.k, a_stride, dtype), weights, out=result)
            return
        reference.gemm(
            view(a, p.m, p.k, a_stride, dtype),
            view(w, p.n, p.k, w_stride, dtype),
            bias=view(bias, 1, p.n, p.n, dtype)[0] if p.epilogue.bias else None,
            residual=view(residual, p.m, p.n, residual_stride, dtype)
            if p.epilogue.residual
            else None,
            activation=p.epilogue.activation,
            out=result,
        )

    def bind(self, *strides: int, static_weights: bool = False) -> Any:
        """As a plan's: the launch for these strides."""
        self.static_weights.append(static_weights)

        def launch(a: int, w: int, out: int, bias: int, res: int, workspace: int, stream: int):
            self.launch(a, w, out, bias, res, *strides, workspace, stream)

        return launch


class FakeKernels:
    """Prepares fake plans and counts the variants that it would have compiled."""

    def __init__(self) -> None:
        self.loaded: set[Any] = set()
        self.plans: list[FakePlan] = []

    def _variant(self, problem: GemmProblem, config: GemmConfig) -> Any:
        c = config
        tile = (c.block_m, c.block_n, c.block_k, c.num_warps, c.num_stages, c.swap, c.split != 1)
        return (c.kernel, *tile, problem.dtype, problem.epilogue)

    def is_loaded(self, problem: GemmProblem, config: GemmConfig) -> bool:
        return self._variant(problem, config) in self.loaded

    def prepare(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> FakePlan:
        self.loaded.add(self._variant(problem, config))
        needed = 0 if config.split == 1 else COUNTER_BYTES + 4096
        self.plans.append(FakePlan(problem, config, budget, needed))
        return self.plans[-1]


class FakeLibrary:
    """Plans like cuBLASLt; `GemmConfig.kernel` of its plans is "cublaslt"."""

    def __init__(self) -> None:
        self.plans: list[FakePlan] = []

    def plan(self, problem: GemmProblem, budget: Budget) -> FakePlan:
        config = GemmConfig("cublaslt", 128, 128, 64)
        self.plans.append(FakePlan(problem, config, budget, COUNTER_BYTES))
        return self.plans[-1]


class FakeSilu:
    """`silu_and_mul` by addresses; `loaded` as long as it may be used in a capture."""

    def __init__(self) -> None:
        self.loaded = False
        self.launches: list[Budget] = []

    def is_loaded(self, problem: GemmProblem) -> bool:
        return self.loaded

    def bind(self, problem: GemmProblem, budget: Budget, out_stride: int) -> Any:
        self.loaded = True
        p, dtype = problem, DTYPES[problem.dtype]

        def launch(gate_up: int, out: int, stream: int) -> None:
            self.launches.append(budget)
            gate, up = view(gate_up, p.m, p.n, p.n, dtype).float().chunk(2, dim=1)
            result = view(out, p.m, p.n // 2, out_stride, dtype)
            result.copy_(torch.nn.functional.silu(gate) * up)

        return launch


class FakeDevice:
    """One device: its dispatcher, its streams (a number each) and whether a capture is on."""

    def __init__(self, capability: tuple[int, int] = (9, 0), tables: Any = None) -> None:
        self.kernels, self.library, self.silu = FakeKernels(), FakeLibrary(), FakeSilu()
        self.stream, self.is_capturing, self.capture = 7, False, 0
        self.budgets = {7: Budget(132, "grid", True), 8: Budget(32, "mask", False)}
        self.dispatcher = Dispatcher(
            FakeProfile(capability),  # type: ignore[arg-type]
            tables,
            lambda: self.kernels,
            lambda: self.library,
            silu=lambda: self.silu,
        )
        streams = streams_of(self)
        self.workspaces = Workspaces(
            torch.device("cpu"), streams.capturing, lambda raw: self.capture
        )
        self.eager = EagerOperator(GEMM, -1, self.dispatcher, streams, self.workspaces)
        self.eager_swiglu = EagerOperator(
            GEMM_SWIGLU, -1, self.dispatcher, streams, self.workspaces
        )

    def gemm(self, a: Any, w: Any, **options: Any) -> torch.Tensor:
        found: torch.Tensor = self.eager(Gemm(a, w, **options))
        return found

    def gemm_swiglu(self, a: Any, w: Any, **options: Any) -> torch.Tensor:
        found: torch.Tensor = self.eager_swiglu(Swiglu(a, w, **options))
        return found


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def make_device() -> type[FakeDevice]:
    """The class itself, for a device that differs from the default."""
    return FakeDevice
