"""What the GEMM tests on a GPU share: operands, ground truth, a kernel that holds SMs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from smkern.kernels.gemm_compile import compile_tasks
from smkern.kernels.gemm_variants import variant_of
from smkern.ops.gemm.dispatch import gemm_dispatcher
from smkern.ops.gemm.operator import GEMM
from smkern.ops.operator import Operator
from smkern.ops.operator_eager import EagerOperator, workspaces_of
from smkern.ops.reference import gemm as reference
from smkern.ops.streams import runtime_streams
from smkern.tuning.config import Budget, Dtype, Epilogue, GemmConfig, GemmProblem
from tests.gpu.compiling import compile_shared
from tests.gpu.sides import total_sms

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
GUARD = 8
"""Poisoned rows and columns (16 bytes) around every output."""


@dataclass(frozen=True, slots=True)
class Case:
    """One GEMM under test."""

    m: int = 96
    n: int = 256
    k: int = 512
    dtype: Dtype = "bf16"
    epilogue: Epilogue = field(default_factory=Epilogue)
    padding: int = 0

    @property
    def aligned(self) -> bool:
        return self.padding % 8 == 0 and self.n % 8 == 0 and self.k % 8 == 0

    @property
    def problem(self) -> GemmProblem:
        return GemmProblem(self.m, self.n, self.k, self.dtype, self.epilogue, self.aligned)

    def __str__(self) -> str:
        size = f"{self.m}x{self.n}x{self.k}"
        return f"{size}-{self.dtype}-{self.epilogue.key}" + f"-pad{self.padding}" * bool(
            self.padding
        )


@dataclass(slots=True)
class Operands:
    """Tensors of a case: inputs lie in NaNs, the output in NaNs and made of NaNs."""

    a: Tensor
    w: Tensor
    bias: Tensor | None
    residual: Tensor | None
    out: Tensor
    frame: Tensor

    def epilogue(self) -> dict[str, Tensor | None]:
        return {"bias": self.bias, "residual": self.residual}

    def on_host(self) -> Operands:
        """The same on the CPU, so that no library's kernel has to run for the ground truth."""
        frame = self.frame.cpu()
        rows, cols = self.out.shape
        out = frame[GUARD : GUARD + rows, GUARD : GUARD + cols]
        bias = None if self.bias is None else self.bias.cpu()
        residual = None if self.residual is None else self.residual.cpu()
        return Operands(self.a.cpu(), self.w.cpu(), bias, residual, out, frame)


def framed(rows: int, cols: int, dtype: torch.dtype, padding: int = 0) -> tuple[Tensor, Tensor]:
    """A view [rows, cols] into a frame of NaNs, and the frame; 16-byte aligned without padding."""
    pitch = GUARD + -(-cols // 8) * 8 + GUARD + padding
    frame = torch.full((rows + 2 * GUARD, pitch), float("nan"), dtype=dtype, device="cuda")
    return frame[GUARD : GUARD + rows, GUARD : GUARD + cols], frame


def operands(case: Case, seed: int = 0) -> Operands:
    """Normal random inputs; with `padding`, row pitches that are no multiple of 16 bytes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    dtype = TORCH[case.dtype]

    def filled(rows: int, cols: int) -> Tensor:
        view, _ = framed(rows, cols, dtype, case.padding)
        random = torch.randn((rows, cols), device="cuda", generator=generator)
        return view.copy_(random)

    a, w = filled(case.m, case.k), filled(case.n, case.k)
    bias = filled(1, case.n)[0] if case.epilogue.bias else None
    residual = filled(case.m, case.n) if case.epilogue.residual else None
    out, frame = framed(case.m, case.n, dtype, case.padding)
    return Operands(a, w, bias, residual, out, frame)


def check(case: Case, x: Operands, out: Tensor | None = None) -> None:
    """Hold an output against float64, and its frame against writes.

    One rounding of the result, plus what fp32 accumulation in the tensor cores may lose: 2^-18 of
    the sum of magnitudes (k / 16 truncated additions).
    """
    out = x.out if out is None else out
    want = reference.gemm(
        x.a, x.w, **x.epilogue(), activation=case.epilogue.activation,
        compute_dtype=torch.float64, out=torch.empty(out.shape, dtype=torch.float64).to(out.device),
    )  # fmt: skip
    magnitude = x.a.double().abs() @ x.w.double().abs().t()
    eps = torch.finfo(out.dtype).eps
    tolerance = 0.52 * eps * want.abs() + 2**-18 * magnitude + 1e-5
    check_near(out, want, tolerance, case)
    if out is x.out:
        check_frame(x.frame, out)


def check_near(out: Tensor, want: Tensor, tolerance: Tensor, what: object) -> None:
    """Hold each number of an output within its tolerance of float64's; NaN is not."""
    wrong = ~((out.double() - want).abs() <= tolerance)
    if wrong.any():
        row, col = wrong.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} wrong, first at [{row}, {col}]: "
            f"{out[row, col].item()} for {want[row, col].item()} ± {tolerance[row, col].item()}"
        )


def check_frame(frame: Tensor, inner: Tensor) -> None:
    """Hold a frame against writes around what lies in it."""
    outside = torch.ones_like(frame, dtype=torch.bool)
    outside[GUARD : GUARD + inner.shape[0], GUARD : GUARD + inner.shape[1]] = False
    assert frame[outside].isnan().all(), "wrote outside of the result"


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def precompile_all(wanted: Iterable[tuple[GemmProblem, GemmConfig]]) -> None:
    """Compile in parallel what a module of tests will launch; the rest is loading."""
    variants = {variant_of(p, c, capability()) for p, c in wanted if c.kernel != "cublaslt"}
    compile_shared(compile_tasks(sorted(variants)))


def dispatched(case: Any, backend: str | None) -> tuple[GemmProblem, GemmConfig]:
    """What a case runs by on the whole device; the case may be one of `swiglu_support`."""
    select = gemm_dispatcher(torch.cuda.current_device()).select
    return case.problem, select(case.problem, Budget(total_sms(), "grid"), backend).config


class Launch:
    """A configuration's launch of a case, its memory there, the workspace's partials poisoned."""

    def __init__(self, case: Any, x: Operands, config: GemmConfig, budget: Budget) -> None:
        dispatcher = gemm_dispatcher(torch.cuda.current_device())
        self.x, self.plan = x, dispatcher.prepare(case.problem, config, budget)
        size = max(self.plan.workspace_bytes, 1 << 16)
        self.room = torch.zeros(size, dtype=torch.uint8, device="cuda")
        self.room[1 << 16 :].fill_(255)

    def __call__(self, stream: int) -> None:
        x = self.x
        residual = (0, 0) if x.residual is None else (x.residual.data_ptr(), x.residual.stride(0))
        launch = self.plan.bind(x.a.stride(0), x.w.stride(0), x.out.stride(0), residual[1])
        launch(
            x.a.data_ptr(), x.w.data_ptr(), x.out.data_ptr(),
            0 if x.bias is None else x.bias.data_ptr(), residual[0], self.room.data_ptr(), stream,
        )  # fmt: skip


def run_config(case: Any, x: Operands, config: GemmConfig, budget: Budget) -> None:
    """Launch a configuration on the current stream."""
    launch = Launch(case, x, config, budget)
    launch(torch.cuda.current_stream().cuda_stream)
    assert not launch.room[: 1 << 16].any(), f"{config}: counters are left behind"


def fresh_eager(op: Operator = GEMM) -> EagerOperator:
    """The eager path with nothing loaded, beside the process's own."""
    index = torch.cuda.current_device()
    made = gemm_dispatcher.__wrapped__(index), runtime_streams(), workspaces_of.__wrapped__(index)
    return EagerOperator(op, index, *made)


@triton.jit
def _hold(flag, started, limit_ns):
    tl.atomic_add(started, 1)
    begin = tl.extra.cuda.globaltimer()
    value = tl.load(flag, volatile=True)
    while (value == 0) & (tl.extra.cuda.globaltimer() - begin < limit_ns):
        value = tl.load(flag, volatile=True)


class Holder:
    """Holds every SM of a partition until released, or for five seconds.

    Two CTAs of 1024 threads fill an SM's thread slots, so nothing else can start there.
    """

    def __init__(self) -> None:
        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.started = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.one = torch.ones(1, dtype=torch.int32).pin_memory()
        self.seen = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.side = torch.cuda.Stream()
        self.flag.fill_(1)
        _hold[(1,)](self.flag, self.started, 5_000_000_000, num_warps=32)
        self._reset()

    def _reset(self) -> None:
        self.flag.zero_()
        self.started.zero_()
        torch.cuda.synchronize()

    @contextmanager
    def hold(self, stream: torch.cuda.Stream, num_sms: int) -> Iterator[None]:
        """Hold `num_sms` SMs, all that `stream`'s partition has. Copies go by the copy engine."""
        self._reset()
        with torch.cuda.stream(stream):
            _hold[(2 * num_sms,)](self.flag, self.started, 5_000_000_000, num_warps=32)
        deadline = time.monotonic() + 2
        while self._count() < 2 * num_sms:
            assert time.monotonic() < deadline, "the holding kernel did not fill its SMs"
        try:
            yield
        finally:
            with torch.cuda.stream(self.side):
                self.flag.copy_(self.one, non_blocking=True)
            torch.cuda.synchronize()

    def check_inside(self, mine: Any, other: Any, run: Callable[[], object], out: Tensor) -> None:
        """Run on the side `mine` with the other's SMs held, where a CTA placed there would never
        end; `run` enqueues what makes `out`."""
        torch.cuda.synchronize()
        run()  # loads
        torch.cuda.synchronize()
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        with self.hold(other.stream, other.num_sms):
            run()
            assert finishes(mine.stream, 1.0), f"it waits for SMs beside its {mine.num_sms}"

    def _count(self) -> int:
        with torch.cuda.stream(self.side):
            self.seen.copy_(self.started, non_blocking=True)
        self.side.synchronize()
        return int(self.seen[0])


def check_chain(
    split: Iterable[Any], chain: Callable[[bool], Tensor], rooms: Sequence[Tensor]
) -> None:
    """Hold a chain of launches in a graph, which may overlap, against the same one by one.

    Args:
        split: Partitions; it runs in each.
        chain: Enqueues all, waiting for each if it is told so; the last one's result.
        rooms: What they write, poisoned before each replay.
    """
    for partition in split:
        with partition:
            want = chain(True).clone()
        torch.cuda.synchronize()
        with partition.capture() as graph:
            got = chain(False)
        for _ in range(20):
            for room in rooms:
                room.fill_(float("nan"))
            torch.cuda.synchronize()
            partition.launch(graph)
            partition.synchronize()
            assert torch.equal(got, want)
        del graph


def finishes(stream: torch.cuda.Stream, within_s: float) -> bool:
    """Whether what is queued on a stream ends in time; polls, so other streams may hang."""
    event = torch.cuda.Event()
    event.record(stream)
    deadline = time.monotonic() + within_s
    while not event.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True
