"""Warmup: compile, load and launch once everything that dispatch can pick, before serving."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from smkern.errors import ArgumentError, DeviceError
from smkern.ops import validate
from smkern.ops.dispatch import Dispatcher, model_rows
from smkern.ops.eager import EagerGemm, eager_gemm
from smkern.tuning.config import Budget, Dtype, Epilogue, GemmConfig, GemmProblem

OPERATORS = ("gemm",)
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warmup did.

    `choices` counts the (shape, M, budget) combinations visited, `variants` the kernels they come
    down to, `compiled` those that were not loaded before, `launched` the launches, `seconds` all.
    """

    choices: int
    variants: int
    compiled: int
    launched: int
    seconds: float


def rows_to_visit(dispatcher: Dispatcher, n: int, k: int, max_m: int) -> list[int]:
    """The M at which a choice can change, up to the one that serves `max_m`.

    The model's choice is one for all M of a step, a table's cell serves itself and M below it, so
    the steps and the tuned M reach every choice.
    """
    steps, m = [], 1
    while m <= model_rows(max_m):
        steps.append(model_rows(m))
        m = steps[-1] + 1
    cells = dispatcher.tables.cells if dispatcher.tables is not None else {}
    tuned = {key.m for key in cells if (key.n, key.k) == (n, k)}
    return sorted({*steps, *tuned})


def as_budgets(budgets: Iterable[Any] | None, num_sms: int) -> list[Budget]:
    """Budgets from counts, `Budget`s and partitions.

    A count stands for a partition of that size with and without clusters, and for a grid of it.
    None: every multiple of 8, and the device.

    Raises:
        BudgetError: a count below 1 or above the device.
    """
    wanted = [*range(8, num_sms, 8), num_sms] if budgets is None else list(budgets)
    whole = Budget(num_sms, "mask", True)
    found: dict[Budget, None] = {}
    for item in wanted:
        if isinstance(item, Budget):
            found[item] = None
        elif hasattr(item, "confined"):
            found[Budget(item.num_sms, item.confined, item.clusters)] = None
        else:
            count = validate.resolve_budget(item, whole, num_sms).num_sms
            if count == num_sms:
                found[whole] = None
                continue
            for confined in ("mask", "grid"):
                found.update({Budget(count, confined, c): None for c in (True, False)})
    return list(found)


def choices(
    dispatcher: Dispatcher,
    shapes: Sequence[tuple[int, int]],
    budgets: Sequence[Budget],
    *,
    max_m: int,
    dtypes: Sequence[Dtype],
    epilogues: Sequence[Epilogue],
    batch_invariant: Sequence[bool],
    aligned: Sequence[bool],
) -> Iterator[tuple[GemmProblem, GemmConfig, Budget]]:
    """Every choice that dispatch can make for these shapes, with M up to `max_m`.

    Where cuBLASLt would be picked our own choice comes too: a capture may need it.
    """
    for n, k in shapes:
        rows = rows_to_visit(dispatcher, n, k, max_m)
        for dtype in dtypes:
            for epilogue in epilogues:
                for same in batch_invariant:
                    for can_align in aligned:
                        fits = can_align and n % 8 == 0 and k % 8 == 0
                        base = GemmProblem(1, n, k, dtype, epilogue, fits, same)
                        yield from _choices_of(dispatcher, base, rows, budgets)


def _choices_of(
    dispatcher: Dispatcher, base: GemmProblem, rows: Sequence[int], budgets: Sequence[Budget]
) -> Iterator[tuple[GemmProblem, GemmConfig, Budget]]:
    for budget in budgets:
        for m in rows:
            problem = replace(base, m=m)
            config = dispatcher.select(problem, budget).config
            yield problem, config, budget
            if config.kernel == "cublaslt":
                yield problem, dispatcher.select(problem, budget, "own").config, budget


def warmup(
    ops: Sequence[str] = OPERATORS,
    *,
    shapes: Sequence[tuple[int, int]],
    budgets: Iterable[Any] | None = None,
    max_m: int = 8192,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    epilogues: Sequence[Epilogue | str] = ("none",),
    batch_invariant: Sequence[bool] = (False,),
    aligned: Sequence[bool] = (True,),
    workers: int | None = None,
    progress: bool = True,
    device: int | None = None,
) -> WarmupReport:
    """Compile, load and launch once every GEMM variant that dispatch can pick.

    After it no call of these shapes, with any M up to `max_m` in these budgets, compiles or loads.
    The compiling processes are spawned: a script calls this under `if __name__ == "__main__":`.

    Args:
        ops: Operators; "gemm" is the one there is.
        shapes: (N, K) of the weights.
        budgets: Counts of SMs, `Budget`s or partitions; None: multiples of 8, and the device.
        max_m: Largest M.
        dtypes: torch.bfloat16, torch.float16 or both.
        epilogues: `Epilogue`s or their keys: "none", "bias", "bias+residual", "bias+silu", …
        batch_invariant: False, True or both.
        aligned: Whether tensors are 16-byte aligned; both, if some are not.
        workers: Processes that compile; None: the CPUs that this process may use.
        progress: Draw a progress bar.
        device: Index of the GPU; None is the current one.

    Returns:
        Counts and seconds.

    Raises:
        DeviceError: no GPU.
        ArgumentError, BudgetError: a shape, dtype, epilogue or budget that cannot be.

    Example:
        >>> import smkern
        >>> smkern.warmup(shapes=[(6144, 4096)], budgets=[32, 100], max_m=512)  # doctest: +SKIP
    """
    started = time.perf_counter()
    _check_request(ops, shapes, max_m)
    names = [validate.dtype_name(dtype) for dtype in dtypes]
    kinds = [epilogue_from(item) for item in epilogues]
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU is visible: warmup needs the GPU that will serve; without one, "
            "smkern.explain_gemm tells what would be chosen"
        )
    eager = eager_gemm(torch.cuda.current_device() if device is None else device)
    dispatcher = eager.dispatcher
    wanted = choices(
        dispatcher,
        shapes,
        as_budgets(budgets, dispatcher.profile.info.num_sms),
        max_m=max_m,
        dtypes=names,
        epilogues=kinds,
        batch_invariant=batch_invariant,
        aligned=aligned,
    )
    with torch.cuda.device(eager.index), _Bar(progress) as bar:
        return _warm(eager, wanted, workers, bar, started)


def _check_request(ops: Sequence[str], shapes: Sequence[tuple[int, int]], max_m: int) -> None:
    for op in ops:
        if op not in OPERATORS:
            raise ArgumentError(f"ops has {op!r}: there is {list(OPERATORS)}")
    for shape in shapes:
        if len(shape) != 2 or min(shape) < 1:
            raise ArgumentError(f"shapes has {shape}: give (N, K), both at least 1")
    if max_m < 1:
        raise ArgumentError(f"max_m={max_m}: give at least 1")


def epilogue_from(item: Epilogue | str) -> Epilogue:
    """An epilogue from its key, such as "bias+residual+silu" or "none".

    Raises:
        ArgumentError: a part that does not exist.
    """
    if isinstance(item, Epilogue):
        return item
    parts = [] if item == "none" else item.split("+")
    unknown = sorted(set(parts) - {"bias", "residual", *validate.ACTIVATIONS})
    activations: list[Any] = [part for part in parts if part in validate.ACTIVATIONS]
    if unknown or len(activations) > 1:
        raise ArgumentError(
            f"epilogue {item!r}: join 'bias', 'residual' and one of {list(validate.ACTIVATIONS)} "
            "by '+', or give 'none'"
        )
    return Epilogue("bias" in parts, "residual" in parts, activations[0] if activations else None)


class _Bar:
    """A progress bar over named steps, or nothing."""

    def __init__(self, shown: bool) -> None:
        self._context: AbstractContextManager[Any] = nullcontext()
        if shown:
            from rich.progress import Progress

            self._context = Progress(transient=True)
        self._progress: Any = None

    def __enter__(self) -> _Bar:
        self._progress = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def step(self, name: str, total: int) -> Callable[[int], None]:
        """Start a step; call what it returns with the count done so far."""
        if self._progress is None:
            return lambda done: None
        task = self._progress.add_task(name, total=total)
        return lambda done: self._progress.update(task, completed=done)


def _warm(
    eager: EagerGemm,
    wanted: Iterator[tuple[GemmProblem, GemmConfig, Budget]],
    workers: int | None,
    bar: _Bar,
    started: float,
) -> WarmupReport:
    """Sort choices by variant, compile the new ones in parallel, load and launch one of each.

    cuBLASLt picks its kernels by problem and budget, so each of its choices is launched.
    """
    from smkern.kernels.compile import precompile
    from smkern.kernels.variants import variant_of

    dispatcher = eager.dispatcher
    major, minor = dispatcher.profile.info.capability
    smallest: dict[Any, tuple[GemmProblem, GemmConfig]] = {}
    library: list[tuple[GemmProblem, GemmConfig, Budget]] = []
    count = 0
    for problem, config, budget in wanted:
        count += 1
        if config.kernel == "cublaslt":
            library.append((problem, config, budget))
            continue
        variant = variant_of(problem, config, 10 * major + minor)
        known = smallest.get(variant)
        if known is None or problem.bytes_moved < known[0].bytes_moved:
            smallest[variant] = problem, config
    new = [v for v, case in smallest.items() if not dispatcher.is_loaded(*case)]
    if new:
        told = bar.step("compiling", len(new))
        cpus = len(os.sched_getaffinity(0)) if workers is None else workers
        precompile(new, workers=cpus, done=lambda done, total: told(done))
    whole = Budget(dispatcher.profile.info.num_sms, "mask", True)
    cases = [(*case, whole) for case in smallest.values()] + library
    told = bar.step("launching", len(cases))
    for done, case in enumerate(cases):
        launch_once(eager, *case)
        told(done + 1)
    torch.cuda.synchronize(eager.index)
    seconds = time.perf_counter() - started
    return WarmupReport(count, len(smallest), len(new), len(cases), seconds)


def launch_once(eager: EagerGemm, problem: GemmProblem, config: GemmConfig, budget: Budget) -> None:
    """Load what a choice needs and launch it on the current stream, on tensors of its own."""
    plan = eager.dispatcher.prepare(problem, config, budget)
    m, n, k, dtype = problem.m, problem.n, problem.k, TORCH_DTYPES[problem.dtype]
    pitch = -(-k // 8) * 8
    a, w, out, residual, bias = (
        torch.empty(rows, cols, dtype=dtype, device=eager.workspaces.device)
        for rows, cols in ((m, pitch), (n, pitch), (m, n), (m, n), (1, n))
    )
    stream = eager.streams.current_stream(eager.index)
    needed = plan.workspace_bytes
    workspace = eager.workspaces.pointer(stream, needed) if needed else 0
    plan.launch(
        a.data_ptr(), w.data_ptr(), out.data_ptr(),
        bias.data_ptr() if problem.epilogue.bias else 0,
        residual.data_ptr() if problem.epilogue.residual else 0,
        pitch, pitch, n, n, workspace, stream,
    )  # fmt: skip
