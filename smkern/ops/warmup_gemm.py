"""The GEMM's part of a warmup: every choice that dispatch can make, a launch of each variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from smkern.errors import ArgumentError
from smkern.ops import validate
from smkern.ops.dispatch import Dispatcher
from smkern.ops.eager import EagerGemm, eager_gemm
from smkern.ops.kept import model_rows
from smkern.ops.warming import Target, Work
from smkern.tuning import space
from smkern.tuning.config import Budget, Dtype, Epilogue, GemmConfig, GemmProblem

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
        eager = eager_gemm(target.index)
        wanted = choices(
            eager.dispatcher,
            self.shapes,
            target.budgets,
            max_m=self.max_m,
            dtypes=self.dtypes,
            epilogues=self.epilogues,
            batch_invariant=self.batch_invariant,
            aligned=target.aligned,
        )
        return work_of(eager, wanted)


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

    Where another than our own is picked, ours comes too: a capture may need it. SwiGLU unfused
    comes with the choice of its GEMM.
    """
    for n, k in shapes:
        rows = rows_to_visit(dispatcher, n, k, max_m)
        for dtype in dtypes:
            for epilogue in epilogues:
                for same in batch_invariant:
                    for can_align in aligned:
                        base = GemmProblem(1, n, k, dtype, epilogue, False, same)
                        fits = can_align and base.out_columns % 8 == 0 and k % 8 == 0
                        base = replace(base, aligned=fits)
                        yield from _choices_of(dispatcher, base, rows, budgets)


def _choices_of(
    dispatcher: Dispatcher, base: GemmProblem, rows: Sequence[int], budgets: Sequence[Budget]
) -> Iterator[tuple[GemmProblem, GemmConfig, Budget]]:
    for budget in budgets:
        for m in rows:
            problem = replace(base, m=m)
            config = dispatcher.select(problem, budget).config
            yield problem, config, budget
            if config.kernel in space.LIBRARIES:
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
    parts = [] if item == "none" else item.split("+")
    unknown = sorted(set(parts) - {"bias", "residual", *validate.ACTIVATIONS})
    activations: list[Any] = [part for part in parts if part in validate.ACTIVATIONS]
    if unknown or len(activations) > 1:
        raise ArgumentError(
            f"epilogue {item!r}: join 'bias', 'residual' and one of {list(validate.ACTIVATIONS)} "
            "by '+', or give 'none'"
        )
    return Epilogue("bias" in parts, "residual" in parts, activations[0] if activations else None)


def work_of(eager: EagerGemm, wanted: Iterator[tuple[GemmProblem, GemmConfig, Budget]]) -> Work:
    """Sort choices by variant: the smallest of each is launched.

    cuBLASLt picks its kernels by problem and budget, so each of its choices is launched, and so is
    each unfused SwiGLU.
    """
    from smkern.kernels.compile import compile_variant
    from smkern.kernels.variants import variant_of

    dispatcher = eager.dispatcher
    major, minor = dispatcher.profile.info.capability
    smallest: dict[Any, tuple[GemmProblem, GemmConfig]] = {}
    library: list[tuple[GemmProblem, GemmConfig, Budget]] = []
    count = 0
    for problem, config, budget in wanted:
        count += 1
        if config.kernel in space.LIBRARIES:
            library.append((problem, config, budget))
            continue
        variant = variant_of(problem, config, 10 * major + minor)
        known = smallest.get(variant)
        if known is None or problem.bytes_moved < known[0].bytes_moved:
            smallest[variant] = problem, config
    new = sorted(v for v, case in smallest.items() if not dispatcher.is_loaded(*case))
    whole = Budget(dispatcher.profile.info.num_sms, "mask", True)
    cases = [(*case, whole) for case in smallest.values()] + library
    return Work(
        choices=count,
        variants=len(smallest),
        compile=[partial(compile_variant, variant) for variant in new],
        launches=[partial(launch_once, eager, *case) for case in cases],
    )


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
