"""`smkern autotune`: measure configurations inside partitions and write tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from smkern.autotune.attention_cases import heads_option
from smkern.measure.options import IntList, Positive, ShapeList, parse_epilogue, stacked
from smkern.tuning.config import Epilogue

OPS = ("gemm", "gemm_swiglu", "attention", "append", "sample", "moe", "grouped_gemm", "gemm_fp8")
MODEL_MINUTES = 10.0
MODEL_CANDIDATES = 6


def _epilogues(ctx: Any, param: Any, value: str) -> tuple[Epilogue, ...]:
    try:
        return tuple(parse_epilogue(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_model_options = stacked(
    click.option("--model", help="A preset, or a Hugging Face folder: all that it launches."),
    click.option("--tp", type=click.IntRange(1), default=1, help="Ranks that share the model."),
    click.option("--check", is_flag=True, help="Time the model's tables against no tables."),
)
_operator_options = stacked(
    click.option("--op", type=click.Choice(OPS), default="gemm", show_default=True),
    heads_option(),
    click.option(
        "--cache-dtype",
        type=click.Choice(["bf16", "fp8"]),
        default="bf16",
        help="Of attention and append.",
    ),
    click.option(
        "--shapes", type=ShapeList(), help="Weights, as NxK,NxK (IxK of gemm_swiglu's [2I, K])."
    ),
    click.option("--ms", type=IntList(), help="Rows of the activations. Default: the bench's."),
    click.option("--dtype", type=click.Choice(["bf16", "fp16"]), default="bf16", show_default=True),
    click.option(
        "--epilogue",
        "epilogues",
        default="none",
        callback=_epilogues,
        help="Comma-separated: none, bias, bias+silu, residual, …  [default: none]",
    ),
    click.option(
        "--confined",
        type=click.Choice(["mask", "grid", "both"]),
        default="mask",
        show_default=True,
        help="By a partition, or by num_sms= alone.",
    ),
    click.option("--quick", is_flag=True, help="A few cells only: seconds of GPU time."),
    click.option(
        "--raw",
        "raw_path",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Every candidate, as JSONL.",
    ),
)
_common_options = stacked(
    click.option("--budgets", type=IntList(), help="SM counts: 16,32 or 16-132:2."),
    click.option("--minutes", type=Positive(), help="Stop then; run again later."),
    click.option("--top", type=click.IntRange(1), help="Candidates of a cell."),
    click.option("--out", type=click.Path(path_type=Path), help="Table; of --model their folder."),
    click.option("--fresh", is_flag=True, help="Measure again what the table has."),
    click.option("--dry-run", is_flag=True, help="Say what would be measured; needs no GPU."),
    click.option("--workers", type=click.IntRange(1), help="Compilers.  [default: CPUs less two]"),
)


@click.command("autotune")
@_model_options
@_common_options
@_operator_options
@click.pass_context
def command(ctx: click.Context, **options: Any) -> None:
    """Measure configurations inside partitions and write the tuned tables.

    \b
    smkern autotune --model qwen3-8b            # all that it launches, in ten minutes
    smkern autotune --model qwen3-8b --check    # what that was worth
    smkern autotune --model DIR --tp 4 --minutes 30

    --model measures the GPU's ceilings where it has none, then the model's operators that have a
    table on the splits of the default ladder, what can win the most first. Ctrl-C or the end of
    --minutes (default: 10, compiling included) leaves tables with all that was measured; the same
    command goes on from there.

    --op tunes one operator. A cell is a problem in a budget: the model's best candidates are timed
    in that partition, cold L2, interleaved; cells that the table has are left out. Every candidate
    is also kept in --raw; `python -m smkern.autotune.fit` fits the GEMM's cost model to that file.
    gemm_swiglu tunes GEMMs with SwiGLU, which share the GEMM's table: fused, or the plain GEMM
    followed by silu_and_mul. attention takes decode batches and prompts of usual lengths for the
    models of --heads, append steps of a few tokens and of many, sample decode
    batches, moe and grouped_gemm a mixture of experts.
    """
    from smkern.autotune.run import Settings, tune_model, tune_operator

    if (out := options["out"]) is not None and out.exists():
        if options["model"] is None and out.is_dir():
            raise click.UsageError(f"--out {out} is a folder: give a table's file, or --model")
        if options["model"] is not None and not out.is_dir():
            raise click.UsageError(f"--out {out} is a file: with --model give a folder of tables")
    common: dict[str, Any] = {x: options.pop(x) for x in ("budgets", "fresh", "dry_run", "out")}
    # one CPU for this process and one for what it queues: a late launch would be timed
    workers = options.pop("workers") or max(1, len(os.sched_getaffinity(0)) - 2)
    minutes, top = options.pop("minutes"), options.pop("top")
    asked = Settings(**common, workers=workers)
    model = {name: options.pop(name) for name in ("model", "tp", "check")}
    if model["model"] is None:
        if model["check"] or model["tp"] != 1:
            raise click.UsageError("--check and --tp are of a model: give --model too")
        seconds = float("inf") if minutes is None else 60 * minutes
        tune_operator(replace(asked, seconds=seconds, top=top), **options)
        return
    _refuse_operator_options(ctx, options)
    seconds = 60 * (MODEL_MINUTES if minutes is None else minutes)
    tune_model(replace(asked, seconds=seconds, top=top or MODEL_CANDIDATES), **model)


def _refuse_operator_options(ctx: click.Context, options: Mapping[str, Any]) -> None:
    given = [
        name
        for name in options
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    ]
    if given:
        raise click.UsageError(f"--model chooses {', '.join(given)} itself: leave them out")
