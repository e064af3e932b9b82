"""Who computes a GEMM in a benchmark: smkern as dispatched, its own kernels, cuBLAS."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import click
import torch

from smkern.device import Budget
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Place
from smkern.measure.timing import Call
from smkern.ops.gemm.dispatch import Dispatcher
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem
from smkern.tuning.constraints import LIBRARIES

OUR_BACKENDS: dict[str, str | None] = {
    "smkern": None,
    "smkern:triton": "own",
    "smkern:model": "model",
}
"""Provider to the `backend` of `smkern.gemm`: as dispatched; never cuBLAS; the model, no tables."""


def dispatcher_of(device: int = 0) -> Dispatcher:
    """The dispatcher behind `smkern.gemm` on a device that is present."""
    from smkern.ops.gemm.eager import eager_gemm

    return eager_gemm(device).dispatcher


def problem_of(n: int, k: int, m: int, *, batch_invariant: bool = False) -> GemmProblem:
    return GemmProblem(m, n, k, "bf16", batch_invariant=batch_invariant)


def settled_problem(problem: GemmProblem, budget: Budget) -> GemmProblem:
    """The GEMM that dispatch will launch: the plain one where it runs SwiGLU unfused."""
    if dispatcher_of().select(problem, budget).config.kernel != "unfused":
        return problem
    return replace(problem, epilogue=Epilogue())


def precompile(
    dispatcher: Dispatcher,
    wanted: Iterable[tuple[GemmProblem, Budget, str | None]],
    *,
    done: Callable[[int, int], None] | None = None,
) -> int:
    """Compile in parallel what `wanted` (problem, budget, backend) will launch; how many."""
    chosen = ((item[0], dispatcher.select(*item).config) for item in wanted)
    return compile_configs(dispatcher, chosen, done=done)


def compile_configs(
    dispatcher: Dispatcher,
    configs: Iterable[tuple[GemmProblem, GemmConfig]],
    *,
    done: Callable[[int, int], None] | None = None,
) -> int:
    """Compile in parallel what these will launch; how many variants.

    One that does not compile is left to its cell, which will name the error.
    """
    from smkern.kernels.gemm_compile import precompile as compile_all
    from smkern.kernels.gemm_variants import variant_of

    major, minor = dispatcher.profile.info.capability
    variants = {
        variant_of(problem, config, 10 * major + minor)
        for problem, config in configs
        if config.kernel not in LIBRARIES
    }
    try:
        return compile_all(variants, workers=os.cpu_count() or 1, done=done)
    except Exception as error:  # noqa: BLE001  whatever a compiler raises
        click.echo(f"not all variants compile: {type(error).__name__}: {error}", err=True)
        return 0


def dispatched_call(ops: GemmOperands, m: int, **options: Any) -> Call:
    """The public operator; `options` go to `smkern.gemm`."""
    import smkern

    gemm, sets = smkern.gemm, ops.sets(m)
    count = len(sets)

    def call(i: int) -> None:
        a, w, out = sets[i % count]
        gemm(a, w, out=out, **options)

    return call


def cublas_call(ops: GemmOperands, m: int) -> Call:
    """torch.mm, which is cuBLAS with torch's workspace of the stream."""
    sets = [(a, w.t(), out) for a, w, out in ops.sets(m)]
    count = len(sets)

    def call(i: int) -> None:
        a, wt, out = sets[i % count]
        torch.mm(a, wt, out=out)

    return call


@dataclass(slots=True)
class Misled:
    """Our own kernel told the whole device's budget wherever it runs, past all validation.

    It shares one workspace among its calls: they run one after another.
    """

    dispatcher: Dispatcher
    told: Budget
    _workspace: torch.Tensor | None = None

    def config(self, n: int, k: int, m: int) -> GemmConfig:
        return self.dispatcher.select(problem_of(n, k, m), self.told, "own").config

    def call(self, ops: GemmOperands, m: int, place: Place) -> Call:
        """Launches on the place's stream, configured and sized for `told`."""
        config = self.config(ops.n, ops.k, m)
        plan = self.dispatcher.prepare(problem_of(ops.n, ops.k, m), config, self.told)
        workspace, stream = self._workspace_of(plan.workspace_bytes), place.stream.cuda_stream
        launches = [
            (
                *(tensor.data_ptr() for tensor in (a, w, out)),
                *(0, 0),
                *(tensor.stride(0) for tensor in (a, w, out)),
                *(0, workspace, stream),
            )
            for a, w, out in ops.sets(m)
        ]
        launch, count = plan.launch, len(launches)

        def call(i: int) -> None:
            launch(*launches[i % count])

        return call

    def _workspace_of(self, num_bytes: int) -> int:
        """Zeroed afresh, so that a launch that failed before leaves no count behind."""
        if not num_bytes:
            return 0
        if self._workspace is None or self._workspace.nbytes < num_bytes:
            torch.cuda.synchronize()
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._workspace.zero_()
        torch.cuda.synchronize()
        return self._workspace.data_ptr()


def describe(config: GemmConfig) -> str:
    """A configuration in one word: `tma:128x256x64:w8:s3:k1` and what is unusual about it."""
    if config.kernel == "cublaslt":
        return config.kernel
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    parts = [config.kernel, tile, f"w{config.num_warps}", f"s{config.num_stages}"]
    parts.append(f"k{config.split or 'stream'}")
    if config.swap:
        parts.append("swap")
    if config.ctas_per_sm > 1:
        parts.append(f"c{config.ctas_per_sm}")
    if config.max_ctas:
        parts.append(f"max{config.max_ctas}")
    if not config.overlap:
        parts.append("apart")
    return ":".join(parts)
