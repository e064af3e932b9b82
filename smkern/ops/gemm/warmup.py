"""The GEMM's part of a warmup: every choice that dispatch can make, a launch of each variant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.limits import shown
from smkern.ops.bounded_cache import librarys_rows, steps_to
from smkern.ops.checks import DTYPES
from smkern.ops.gemm import warmup_tune
from smkern.ops.gemm.checks import ACTIVATIONS
from smkern.ops.gemm.dispatch import Dispatcher
from smkern.ops.gemm.operator import GEMM
from smkern.ops.operator_eager import EagerOperator, eager_operator
from smkern.ops.warming import Target, Work
from smkern.tuning import constraints
from smkern.tuning.config import Budget, Dtype, Epilogue, GemmConfig, GemmProblem

Choice = tuple[GemmProblem, GemmConfig, Budget]


@dataclass(frozen=True, slots=True)
class GemmCalls:
    """GEMMs to come: of weights [N, K], with M up to `max_m`."""

    shapes: Sequence[tuple[int, int]]
    max_m: int
    dtypes: Sequence[Dtype]
    epilogues: Sequence[Epilogue]
    batch_invariant: Sequence[bool]

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        return work_of(eager_operator(GEMM, target.index), self, target)


def rows_to_visit(dispatcher: Dispatcher, n: int, k: int, max_m: int) -> list[int]:
    """The M at which a choice can change, up to the one that serves `max_m`.

    The model's choice is one for all M of a step, a table's cell serves itself and M below it down
    to half, so the steps, the tuned M and what is right below their halves reach every choice.
    """
    cells = dispatcher.tables.cells if dispatcher.tables is not None else {}
    tuned = {key.m for key in cells if (key.n, key.k) == (n, k)}
    below = {(m - 1) // 2 for m in tuned if m > 2}
    return sorted({*steps_to(max_m), *tuned, *below})


def choices(
    dispatcher: Dispatcher, calls: GemmCalls, budgets: Sequence[Budget], aligned: Sequence[bool]
) -> Iterator[Choice]:
    """Every choice that dispatch can make for these calls.

    Where another than our own is picked, ours comes too: a capture may need it. SwiGLU unfused
    comes with the choice of its GEMM. On the whole device cuBLASLt's come at more M.
    """
    whole = [budget for budget in budgets if budget.num_sms == dispatcher.profile.info.num_sms]
    for base in kinds(calls, aligned):
        rows = rows_to_visit(dispatcher, base.n, base.k, calls.max_m)
        yield from _choices_of(dispatcher, base, rows, budgets)
        between = sorted({*librarys_rows(calls.max_m)} - {*rows})
        yield from _choices_of(dispatcher, base, between, whole)


def kinds(calls: GemmCalls, aligned: Sequence[bool]) -> Iterator[GemmProblem]:
    """The problems of calls that differ in more than M, each with M = 1."""
    for (n, k), dtype, epilogue, same, can_align in product(
        calls.shapes, calls.dtypes, calls.epilogues, calls.batch_invariant, aligned
    ):
        base = GemmProblem(1, n, k, dtype, epilogue, False, same)
        yield replace(base, aligned=can_align and base.out_columns % 8 == 0 and k % 8 == 0)


def _choices_of(
    dispatcher: Dispatcher, base: GemmProblem, rows: Sequence[int], budgets: Sequence[Budget]
) -> Iterator[Choice]:
    for budget in budgets:
        for m in rows:
            problem = replace(base, m=m)
            config = dispatcher.select(problem, budget).config
            yield problem, config, budget
            if config.kernel in constraints.LIBRARIES:
                yield problem, dispatcher.select(problem, budget, "own").config, budget
            if config.kernel == "unfused":
                plain = replace(problem, epilogue=Epilogue())
                yield from _choices_of(dispatcher, plain, [m], [budget])


def epilogue_from(item: Epilogue | str) -> Epilogue:
    """An epilogue from its key, such as "bias+residual+silu" or "none".

    Raises:
        ArgumentError: a part that does not exist.
    """
    if isinstance(item, Epilogue):
        return item
    key = item if isinstance(item, str) else shown(item)
    parts = [] if key == "none" else key.split("+")
    unknown = sorted(set(parts) - {"bias", "residual", *ACTIVATIONS})
    activations: list[Any] = [part for part in parts if part in ACTIVATIONS]
    if unknown or len(activations) > 1:
        raise ArgumentError(
            f"epilogue {shown(item)}: join 'bias', 'residual' and one of {list(ACTIVATIONS)} "
            "by '+', or give 'none'"
        )
    return Epilogue("bias" in parts, "residual" in parts, activations[0] if activations else None)


def work_of(eager: EagerOperator[GemmProblem], calls: GemmCalls, target: Target) -> Work:
    """What calls need on a device, and what is worth measuring of them in the target's places."""
    every = [
        replace(base, m=m)
        for m in warmup_tune.ROWS
        for base in kinds(calls, target.aligned)
        if target.places and m <= calls.max_m
    ]
    cells = warmup_tune.cells_of(eager, every, target.places)
    close = ((cell.problem, config, cell.budget) for cell in cells for config in cell.configs)
    wanted = choices(eager.dispatcher, calls, target.budgets, target.aligned)
    return replace(_work_of(eager, chain(wanted, close)), cells=cells)


def _work_of(eager: EagerOperator[GemmProblem], wanted: Iterable[Choice]) -> Work:
    """Sort choices by variant: the smallest of each is launched.

    cuBLASLt picks its kernels by problem and budget, so each of its choices is launched, and so is
    each unfused SwiGLU.
    """
    from smkern.kernels.gemm_compile import compile_tasks
    from smkern.kernels.gemm_variants import variant_of

    dispatcher = eager.dispatcher
    info = dispatcher.profile.info
    smallest: dict[Any, tuple[GemmProblem, GemmConfig]] = {}
    library: list[tuple[GemmProblem, GemmConfig, Budget]] = []
    count = 0
    for problem, config, budget in wanted:
        count += 1
        if config.kernel in constraints.LIBRARIES:
            library.append((problem, config, budget))
            continue
        variant = variant_of(problem, config, info.sm)
        known = smallest.get(variant)
        if known is None or problem.bytes_moved < known[0].bytes_moved:
            smallest[variant] = problem, config
    new = sorted(v for v, case in smallest.items() if not dispatcher.is_loaded(*case))
    whole = Budget(info.num_sms, "mask", True)
    cases = [(*case, whole) for case in smallest.values()] + library
    return Work(
        choices=count,
        variants=len(smallest),
        compile=compile_tasks(new),
        launches=[partial(launch_once, eager, *case) for case in cases],
    )


def launch_once(
    eager: EagerOperator[GemmProblem], problem: GemmProblem, config: GemmConfig, budget: Budget
) -> None:
    """Load what a choice needs and launch it on the current stream, on tensors of its own.

    A residual is added from a tensor apart and, by cuBLASLt, in place as well: for that it has
    kernels of their own.
    """
    plan = eager.dispatcher.prepare(problem, config, budget)
    m, n, k, dtype = problem.m, problem.n, problem.k, DTYPES[problem.dtype]
    pitch = -(-k // 8) * 8
    a, w, out, residual, bias = (
        torch.empty(rows, cols, dtype=dtype, device=eager.workspaces.device)
        for rows, cols in ((m, pitch), (n, pitch), (m, n), (m, n), (1, n))
    )
    stream = eager.streams.current_stream(eager.index)
    needed = plan.workspace_bytes
    workspace = eager.workspaces.pointer(stream, needed) if needed else 0
    launch = plan.bind(pitch, pitch, n, n)
    for added in residual_pointers(problem.epilogue, config, residual, out):
        launch(
            a.data_ptr(), w.data_ptr(), out.data_ptr(),
            bias.data_ptr() if problem.epilogue.bias else 0, added, workspace, stream,
        )  # fmt: skip


def residual_pointers(
    epilogue: Epilogue, config: GemmConfig, apart: Tensor, out: Tensor
) -> list[int]:
    """Addresses of the residual with which a choice is launched; [0] without one."""
    if not epilogue.residual:
        return [0]
    in_place = [out.data_ptr()] if config.kernel in constraints.LIBRARIES else []
    return [apart.data_ptr(), *in_place]
