"""Which configuration a GEMM of e4m3 takes, and why; nothing is launched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smkern.errors import ArgumentError
from smkern.ops.checks import FP8_BLOCK
from smkern.ops.explain import dispatcher_and_budget
from smkern.ops.fp8.dispatch import (
    ScaledDispatcher,
    fp8_dispatcher,
    fuses,
    kernel_of,
    of_step,
    offline_dispatcher,
)
from smkern.ops.gemm.dispatch import Explanation, workspace_bytes
from smkern.tuning import constraints
from smkern.tuning.config import Budget, Epilogue, GemmConfig
from smkern.tuning.fp8 import ScaledProblem, Scales
from smkern.tuning.fp8_rows import OutScale


def _source(
    dispatcher: ScaledDispatcher, problem: ScaledProblem, budget: Budget, config: GemmConfig
) -> str:
    """Where the choice of a configuration comes from."""
    if problem.kernel not in ("", "own", "model"):
        return "forced"
    if config == constraints.CUBLASLT:
        return "library"
    return "table" if dispatcher.tuned(of_step(problem), budget) == config else "model"


def explain_scaled(
    sizes: tuple[int, ...],
    epilogue: Epilogue,
    *,
    scales: Scales,
    out_scale: OutScale | None = None,
    aligned: bool,
    batch_invariant: bool,
    backend: str | None,
    device: int | None,
    **place: Any,
) -> Explanation:
    """The choice for a product of e4m3 with bf16 results, or for one of gate and up into e4m3.

    Args:
        sizes: Rows of a, columns of out and of a.
        epilogue: What is done to the product; SwiGLU halves its columns, by a kernel of its own
            but where one does all.
        scales: What each of them counts.
        out_scale: What shares one of the results, of SwiGLU into e4m3. None: they have none.
        aligned: Whether addresses and row pitches are multiples of 16 bytes.
        batch_invariant: As in `smkern.gemm`.
        backend: As in `smkern.gemm`.
        device: GPU index; None is the current one.
        place: As `smkern.ops.explain.dispatcher_and_budget` takes it.
    """
    dispatcher, budget = dispatcher_and_budget(device, fp8_dispatcher, offline_dispatcher, **place)
    m, n, k = sizes
    if epilogue.swiglu:
        n, epilogue = 2 * n, Epilogue()
    if scales == "block" and k % FP8_BLOCK:
        raise ArgumentError(f"k={k}: block scales want a multiple of {FP8_BLOCK}")
    whole = aligned and n % 8 == 0 and k % 16 == 0
    problem = ScaledProblem(m, n, k, "bf16", epilogue, scales, whole, batch_invariant)
    if out_scale is None:
        problem = replace(problem, kernel=kernel_of(backend, problem))
    elif fuses(
        problem, dispatcher.profile.info.capability, backend, into_blocks=out_scale == "block"
    ):
        problem = replace(problem, epilogue=Epilogue(swiglu=True))
    config = dispatcher.select(problem, budget)
    tiles = constraints.num_tiles(problem.twin, config)
    return Explanation(
        problem,
        budget,
        replace(config, block_k=2 * config.block_k),
        _source(dispatcher, problem, budget, config),
        dispatcher.predicted_us(problem, budget),
        0 if config.kernel == "pointer" else workspace_bytes(problem.twin, config, budget),
        tiles,
        tiles / constraints.num_ctas(config, budget),
        dispatcher.profile.info.name,
    )
