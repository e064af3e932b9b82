"""Warmup: compile, load and launch once everything that dispatch can pick, before serving."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch

from smkern.errors import ArgumentError, DeviceError
from smkern.ops import checks
from smkern.ops.annotated import checked
from smkern.ops.gemm.warmup import GemmCalls, epilogue_from
from smkern.ops.gemm.warmup_tune import places_of
from smkern.ops.gemm.warmup_tune import tune as tune_cells
from smkern.ops.warming import Bar, Target, Warmable, Work, as_budgets, check_shapes
from smkern.tuning.config import Epilogue

OPERATORS = ("gemm", "attention", "append")


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """What a warmup did.

    `choices` counts the combinations of numbers visited, `variants` the kernels they come down to,
    `compiled` those that were not loaded before, `launched` the launches, `seconds` the time.
    `tuned` counts the problems whose configuration was measured.
    """

    choices: int
    variants: int
    compiled: int
    launched: int
    seconds: float
    tuned: int = 0


@checked
def warmup(
    ops: Sequence[str] | None = None,
    *,
    shapes: Sequence[tuple[int, int]] = (),
    attention: Sequence[Warmable] = (),
    append: Sequence[Warmable] = (),
    calls: Sequence[Warmable] = (),
    budgets: Iterable[Any] | None = None,
    max_m: int = 8192,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    epilogues: Sequence[Epilogue | str] = ("none",),
    batch_invariant: Sequence[bool] = (False,),
    aligned: Sequence[bool] = (True,),
    workers: int | None = None,
    progress: bool = True,
    device: int | None = None,
    tune: bool = False,
    tune_s: float = 20.0,
) -> WarmupReport:
    """Compile, load and launch once every kernel that dispatch can pick.

    After it no GEMM of these shapes with any M up to `max_m`, and no attention, plan, merge, append
    or other call of these models with any batch and lengths, compiles or loads in these budgets.
    One exception: cuBLASLt, which serves the whole device between tuned M, picks a kernel by M
    itself. It is launched for each M up to 512 and for multiples of 64 above, as the runtime pads
    rows, and with a residual in place as well as not; another M may load one more kernel, which
    waits for all that is on its way.
    The compiling processes are spawned: a script calls this under `if __name__ == "__main__":`.

    With `tune`, GEMMs (SwiGLU's too) that no table serves are measured where the model holds
    several configurations for about as fast, and this process keeps the fastest; `explain_gemm`
    says "warmup" then. That is for M of 1, 16 and powers of two up to 8192, each with its step of
    rows, in the partitions that `budgets` names and, on the current stream, in what that has and
    in grids below. A batch-invariant choice is never measured.

    Args:
        ops: "gemm", "attention", "append"; None: those of the next three arguments that are given.
        shapes: (N, K) of GEMMs' weights.
        attention: `smkern.AttentionCalls`, one a model.
        append: `smkern.AppendCalls`, one a model.
        calls: The other operators' calls: `smkern.RowsCalls` and the like.
        budgets: Counts of SMs, `Budget`s or partitions; None: multiples of 8, and the device.
        max_m: Largest M of a GEMM.
        dtypes: GEMM dtypes: torch.bfloat16, torch.float16 or both.
        epilogues: GEMM epilogues: `Epilogue`s or their keys: "none", "bias", "bias+residual", …
        batch_invariant: `batch_invariant` of GEMMs: False, True or both.
        aligned: Whether tensors are 16-byte aligned; both, if some are not.
        workers: Processes that compile; None: the CPUs that this process may use. Each imports the
            script that runs: what that does belongs under `if __name__ == "__main__":`.
        progress: Draw a progress bar.
        device: Index of the GPU; None is the current one.
        tune: Measure where the model is unsure.
        tune_s: Seconds that measuring may take, beside compiling what is measured.

    Returns:
        Counts and seconds.

    Raises:
        DeviceError: no GPU.
        ArgumentError, BudgetError: a shape, dtype, epilogue or budget that cannot be.

    Example:
        >>> import smkern
        >>> llama = smkern.AttentionCalls(num_q_heads=32, num_kv_heads=8, head_dim=128,
        ...                               page_size=16, max_q_len=2048)
        >>> smkern.warmup(shapes=[(6144, 4096)], attention=[llama],
        ...               budgets=[32, 100])  # doctest: +SKIP
    """
    started = time.perf_counter()
    given: dict[str, Sequence[Any]] = {"gemm": shapes, "attention": attention, "append": append}
    _check_request(ops, given, max_m)
    if not tune_s >= 0:
        raise ArgumentError(f"tune_s={tune_s}: give seconds, at least 0")
    budgets = None if budgets is None else list(budgets)
    wanted: list[Warmable] = [*attention, *append, *calls]
    names = [checks.dtype_name(dtype) for dtype in dtypes]
    kinds = [epilogue_from(item) for item in epilogues]
    if shapes:
        wanted.insert(0, GemmCalls(shapes, max_m, names, kinds, batch_invariant))
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU is visible: warmup needs the GPU that will serve; without one, "
            "smkern.explain_gemm and smkern.explain_attention tell what would be chosen"
        )
    from smkern.device import device_info
    from smkern.partition import current_budget

    index = torch.cuda.current_device() if device is None else device
    num_sms = device_info(index).num_sms
    resolved, places = as_budgets(budgets, num_sms), {}
    if tune:
        stream = torch.cuda.current_stream(index)
        places = places_of(budgets or (), resolved, current_budget(index), stream)
    target = Target(index, num_sms, resolved, aligned, places)
    with torch.cuda.device(index), Bar(progress) as bar:
        works = (each.work(target) for each in wanted)
        report = run_all(works, workers, bar, started, tune_s)
        torch.cuda.synchronize(index)
    return report


def _check_request(ops: Sequence[str] | None, given: dict[str, Sequence[Any]], max_m: int) -> None:
    for op in ops or ():
        if op not in OPERATORS:
            raise ArgumentError(f"ops has {op!r}: there is {list(OPERATORS)}")
    for op, calls in given.items():
        if ops is not None and bool(calls) != (op in ops):
            raise ArgumentError(
                f"ops={list(ops)} and {len(calls)} calls of {op!r} are given: give calls of the "
                "operators named, or leave ops at None"
            )
    check_shapes(given["gemm"], max_m)


def run_all(
    given: Iterable[Work], workers: int | None, bar: Bar, started: float, tune_s: float = 0.0
) -> WarmupReport:
    """Compile all that is new side by side, load and launch one after another, then measure.

    What a work has to compile is begun before the next one is made, which takes seconds of
    choosing. A family's launches may need what its compilations leave in the cache, and nothing
    else.
    """
    from smkern.kernels.compile import Compilations

    works: list[Work] = []
    cpus = len(os.sched_getaffinity(0)) if workers is None else workers
    try:
        with Compilations(cpus) as compilations:
            for work in given:
                works.append(work)
                compilations.begin(work.compile)
            told = bar.step("compiling", len(compilations))
            compilations.wait(lambda done, total: told(done))
    except BrokenProcessPool as error:
        raise ArgumentError(
            f"workers={cpus}: a process that compiles has ended early. Each imports the script "
            "that began it: put what it does under if __name__ == '__main__':, or compile here by "
            "workers=1; where memory is short give fewer"
        ) from error
    launches = [launch for work in works for launch in work.launches]
    told = bar.step("launching", len(launches))
    for done, launch in enumerate(launches):
        launch()
        told(done + 1)
    tuned = tune_cells([cell for work in works for cell in work.cells], tune_s)
    return WarmupReport(
        choices=sum(work.choices for work in works),
        variants=sum(work.variants for work in works),
        compiled=len(compilations),
        launched=len(launches),
        seconds=time.perf_counter() - started,
        tuned=tuned,
    )
