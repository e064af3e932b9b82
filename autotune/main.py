"""`smkern autotune`: measure configurations inside partitions and write tables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from smkern.autotune import attention, gemm, raw
from smkern.autotune.attention_cases import (
    MODELS,
    QUICK_MODELS,
    heads_option,
    quick_cases,
    tuned_cases,
)
from smkern.autotune.shortlist import parse_epilogue, problems
from smkern.bench.cases import BUDGETS, MS, SHAPES, IntList, ShapeList
from smkern.device import Confinement
from smkern.profile import load_profile
from smkern.tuning import space
from smkern.tuning.config import Epilogue, Kernel
from smkern.tuning.table import TableStore, user_path

QUICK_SHAPES = ((4096, 4096),)
SWIGLU_SHAPES = ((14336, 4096), (12288, 4096), (17408, 5120), (25600, 5120))
"""(I, K) of Llama-3.1-8B and of Qwen3-8B, -14B and -32B."""
QUICK_MS = (16, 512)
QUICK_BUDGETS = (32, 100)


def _epilogues(ctx: Any, param: Any, value: str) -> tuple[Epilogue, ...]:
    try:
        return tuple(parse_epilogue(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _kernels(ctx: Any, param: Any, value: str | None) -> tuple[Kernel, ...]:
    names = tuple(value.split(",")) if value else space.AVAILABLE
    unknown = [name for name in names if name not in space.AVAILABLE]
    if unknown:
        raise click.BadParameter(f"{unknown} are none of {space.AVAILABLE}")
    return names  # type: ignore[return-value]


@click.command("autotune")
@click.option(
    "--op",
    type=click.Choice(
        ["gemm", "gemm_swiglu", "attention", "append", "rows", "sample", "moe", "grouped_gemm"]
    ),
    default="gemm",
    show_default=True,
)
@heads_option()
@click.option("--cache-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16")
@click.option(
    "--shapes", type=ShapeList(), help="Weights, as NxK,NxK (IxK of gemm_swiglu's [2I, K])."
)
@click.option(
    "--ms",
    type=IntList(),
    help="Rows of the activations. Default: the bench's.",
)
@click.option("--budgets", type=IntList(), help="SM counts: 16,32 or 16-132:2.")
@click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True)
@click.option(
    "--epilogue",
    "epilogues",
    default="none",
    callback=_epilogues,
    help="Comma-separated: none, bias, bias+silu, residual, …  [default: none]",
)
@click.option("--top", type=click.IntRange(1), default=8, show_default=True, help="Candidates.")
@click.option("--kernels", callback=_kernels, help="Only these of our kernels, comma-separated.")
@click.option("--cublaslt/--no-cublaslt", default=True, help="cuBLASLt as a candidate.")
@click.option(
    "--confined", type=click.Choice(["mask", "grid", "both"]), default="mask", show_default=True
)
@click.option("--contended", is_flag=True, help="Beside a memory-bound neighbour.")
@click.option("--quick", is_flag=True, help="A few cells only: seconds of GPU time.")
@click.option(
    "--time-limit-s", type=float, default=float("inf"), help="Stop then; run again later."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Table to write.")
@click.option("--raw", "raw_path", type=click.Path(path_type=Path, dir_okay=False), help="JSONL.")
@click.option("--fresh", is_flag=True, help="Measure again what --raw already has.")
@click.option("--dry-run", is_flag=True, help="Say what would be measured; needs no GPU.")
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count() or 1, help="Compilers.")
def command(
    op: str,
    heads: Any,
    cache_dtype: Any,
    shapes: Any,
    ms: Any,
    budgets: Any,
    dtype: str,
    epilogues: tuple[Epilogue, ...],
    top: int,
    kernels: tuple[Kernel, ...],
    cublaslt: bool,
    confined: str,
    contended: bool,
    quick: bool,
    time_limit_s: float,
    out: Path | None,
    raw_path: Path | None,
    fresh: bool,
    dry_run: bool,
    workers: int,
) -> None:
    """Measure configurations inside partitions and write the tuned table.

    A cell is a problem in a budget: the model's best candidates are timed in that partition, cold
    L2, interleaved. Every result is also kept in --raw; run again, only what is missing there is
    measured. `python -m smkern.autotune.fit` fits the GEMM's cost model to that file.

    --op gemm_swiglu tunes GEMMs with SwiGLU, which share the GEMM's table: fused, or the plain GEMM
    followed by silu_and_mul. --op attention takes decode batches and prompts of usual lengths for
    the models of --heads, --op append steps of a few tokens and of many, --op rows norms and
    activations of few rows and of many, --op sample decode batches, --op moe and --op grouped_gemm
    a mixture of experts.
    """
    modes: tuple[Confinement, ...] = ("mask", "grid") if confined == "both" else (confined,)  # type: ignore[assignment]
    if op == "attention":
        cases = quick_cases(cache_dtype) if quick else None
        if heads or cases is None:
            cases = tuned_cases(heads or MODELS, cache_dtype=cache_dtype)
        counts = budgets or (attention.QUICK_BUDGETS if quick else attention.BUDGETS)
        wanted = attention.Request(cases, counts, modes, contended, time_limit_s, _command_line())
        _tune_other(op, attention, wanted, out, raw_path, fresh=fresh, dry_run=dry_run)
        return
    if op == "append":
        from smkern.autotune import append

        models = heads or (QUICK_MODELS if quick else MODELS)
        tokens = append.QUICK_TOKENS if quick else append.TOKENS
        counts = budgets or (attention.QUICK_BUDGETS if quick else attention.BUDGETS)
        steps = append.tuned_cases(models, cache_dtype=cache_dtype, tokens=tokens)
        other = append.Request(steps, counts, modes, contended, time_limit_s, _command_line())
        _tune_other(op, append, other, out, raw_path, fresh=fresh, dry_run=dry_run)
        return
    if op == "rows":
        from smkern.autotune import rows

        sizes = ms or (rows.QUICK_ROWS if quick else rows.ROWS)
        counts = budgets or (rows.QUICK_BUDGETS if quick else rows.BUDGETS)
        each = rows.tuned_cases(rows=sizes)
        steps_of_rows = rows.Request(each, counts, modes, contended, time_limit_s, _command_line())
        _tune_other(op, rows, steps_of_rows, out, raw_path, fresh=fresh, dry_run=dry_run)
        return
    if op == "sample":
        from smkern.autotune import sample

        drawn = sample.tuned_cases(rows=ms or (sample.QUICK_ROWS if quick else sample.ROWS))
        counts = budgets or (sample.QUICK_BUDGETS if quick else sample.BUDGETS)
        draws = sample.Request(drawn, counts, modes, contended, time_limit_s, _command_line())
        _tune_other(op, sample, draws, out, raw_path, fresh=fresh, dry_run=dry_run)
        return
    if op in ("moe", "grouped_gemm"):
        from smkern.autotune import moe

        family = moe.MOE if op == "moe" else moe.GROUPED
        each_moe = family.tuned_cases(ms or (moe.QUICK_TOKENS if quick else moe.TOKENS))
        counts = budgets or (moe.QUICK_BUDGETS if quick else moe.BUDGETS)
        layers = moe.Request(each_moe, counts, modes, contended, time_limit_s, _command_line())
        _tune_other(op, family, layers, out, raw_path, fresh=fresh, dry_run=dry_run)
        return
    if op == "gemm_swiglu":
        epilogues = (Epilogue(swiglu=True),)
        inner_shapes = shapes or (SWIGLU_SHAPES[:1] if quick else SWIGLU_SHAPES)
        shapes = tuple((2 * inner, k) for inner, k in inner_shapes)
    request = gemm.Request(
        problems(
            shapes or (QUICK_SHAPES if quick else SHAPES),
            ms or (QUICK_MS if quick else MS),
            dtype,
            epilogues,
        ),
        top,
        kernels,
        cublaslt,
        contended,
        time_limit_s,
        workers,
    )
    counts = budgets or (QUICK_BUDGETS if quick else BUDGETS)
    if dry_run:
        gemm.describe(request, counts, load_profile())
        return
    from smkern.device import device_info

    gpu = device_info().name
    out = out or user_path(gpu, "gemm-contended" if contended else "gemm")
    raw_path = raw_path or out.with_suffix(".raw.jsonl")
    known = [] if fresh or not raw_path.exists() else raw.load(raw_path)
    gemm.tune(request, counts, modes, TableStore(out), raw_path, known, _command_line())


def _tune_other(
    op: str,
    tuner: Any,
    request: Any,
    out: Path | None,
    raw_path: Path | None,
    *,
    fresh: bool,
    dry_run: bool,
) -> None:
    """By an operator's own module: `attention`, `append`, …"""
    if dry_run:
        tuner.describe(request, load_profile())
        return
    from smkern.device import device_info

    name = f"{op}-contended" if request.contended else op
    out = out or user_path(device_info().name, name)
    tuner.tune(request, out, raw_path or out.with_suffix(".raw.jsonl"), fresh=fresh)


def _command_line() -> str:
    """The command as a reader would type it, without paths of this machine."""
    words = sys.argv[2:] if sys.argv[1:2] == ["autotune"] else sys.argv[1:]
    return " ".join(["smkern autotune", *(Path(w).name if w.startswith("/") else w for w in words)])


if __name__ == "__main__":
    command()
