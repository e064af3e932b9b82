"""Our GEMM kernel in Triton's interpreter: values without a GPU, slowly.

Triton chooses the interpreter when it is imported, so this needs a process of its own:
`TRITON_INTERPRET=1 python examples/interpreted_gemm.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import click
import torch
from torch import Tensor

from smkern.kernels.gemm_schedule import MAX_COUNTERS, make_schedule
from smkern.kernels.gemm_triton import gemm_pointer
from smkern.tuning.config import STREAM_K, Budget, GemmConfig, GemmProblem


@dataclass(frozen=True, slots=True)
class Check:
    """One interpreted launch: how many CTAs ran, and the error relative to fp64."""

    budget: int
    split: str
    ctas: int
    error: float

    def __str__(self) -> str:
        return (
            f"{self.budget:3} SMs, {self.split:8}: {self.ctas:3} CTAs, error {self.error:.1e} "
            "against fp64"
        )


def gemm(
    a: Tensor, w: Tensor, config: GemmConfig, budget: Budget, counters: Tensor | None = None
) -> tuple[Tensor, int]:
    """`a @ w.T` by the pointer kernel, interpreted.

    Args:
        a: [m, k] fp16 or fp32, contiguous, on the CPU (the interpreter gets bf16 wrong).
        w: [n, k], the same.
        counters: [MAX_COUNTERS] int32 zeros, which the kernel leaves as zeros. None: its own.

    Returns:
        out [m, n] of `a`'s dtype, and the CTAs launched.
    """
    (m, k), n = a.shape, w.shape[0]
    problem = GemmProblem(m, n, k, "fp32" if a.dtype == torch.float32 else "fp16", aligned=False)
    schedule = make_schedule(problem, config, budget)
    tile = (config.block_n, config.block_m) if config.swap else (config.block_m, config.block_n)
    x, y = (w, a) if config.swap else (a, w)
    out = torch.full((m, n), torch.nan, dtype=a.dtype)
    partials = torch.full((max(1, schedule.partial_slots) * tile[0] * tile[1],), torch.nan)
    if counters is None:
        counters = torch.zeros(MAX_COUNTERS, dtype=torch.int32)
    gemm_pointer[(schedule.num_ctas,)](
        x_ptr=x,
        y_ptr=y,
        out_ptr=out,
        bias_ptr=out,
        residual_ptr=out,
        partials=partials,
        counters=counters,
        m=m,
        n=n,
        out_stride=out.stride(0),
        residual_stride=0,
        tiles_x=schedule.tiles_x,
        tiles_y=schedule.tiles_y,
        k_iters=schedule.k_iters,
        whole_tiles=schedule.whole_tiles,
        stream_iters=schedule.stream_iters,
        quantum=schedule.quantum,
        group=schedule.group,
        x_stride=x.stride(0),
        y_stride=y.stride(0),
        k=k,
        BLOCK_X=tile[0],
        BLOCK_Y=tile[1],
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        UNIT=1,
        STREAM=config.split != 1,
        SWAP=config.swap,
        BIAS=False,
        RESIDUAL=False,
        ACT="none",
    )
    return out, schedule.num_ctas


def checks(budgets: tuple[int, ...] = (1, 3, 7, 16)) -> Iterator[Check]:
    """A ragged GEMM at several budgets, whole K loops and stream-K."""
    generator = torch.Generator().manual_seed(0)
    a, w = (torch.randn(rows, 136, generator=generator).half() for rows in (77, 150))
    exact = a.double() @ w.double().T
    for budget in budgets:
        for split, name in ((1, "whole K"), (STREAM_K, "stream-K")):
            config = GemmConfig("pointer", 32, 64, 32, split=split)
            out, ctas = gemm(a, w, config, Budget(budget, "grid"))
            error = float((out.double() - exact).abs().max() / exact.abs().max())
            yield Check(budget, name, ctas, error)


@click.command("interpreted")
def command() -> None:
    """Run our GEMM in Triton's interpreter at several budgets; exit 1 if a value is wrong."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise click.UsageError("set TRITON_INTERPRET=1: Triton reads it as it is imported")
    found = list(checks())
    for check in found:
        click.echo(str(check))
    if not all(check.error < 1e-3 and check.ctas <= check.budget for check in found):
        raise SystemExit(1)


if __name__ == "__main__":
    command()
