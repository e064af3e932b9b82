"""`smkern build`: compiles CUTLASS's kernels ahead of time, for this machine or to carry away."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import click

from smkern.device import Budget, gpu_folder
from smkern.errors import DeviceError
from smkern.kernels.cuda_source import cubin_path
from smkern.kernels.cute import cpp_build
from smkern.kernels.cute.compile import ARCH, Kernel, absent, compile_many
from smkern.kernels.fp8.gemm_compile import ScaledVariant
from smkern.kernels.fp8.gemm_compile import variant_of as scaled_variant_of
from smkern.kernels.gemm_variants import Variant, variant_of
from smkern.latency.model_gemms import budgets_of, problems_of, scaled_problems_of
from smkern.latency.work import padded_rows
from smkern.measure.compiling import settled_problem
from smkern.measure.gemm import BUDGETS, MS, SHAPES, Shape
from smkern.measure.options import IntList, ShapeList, parse_epilogue
from smkern.models.config import ModelConfig
from smkern.models.presets import preset
from smkern.models.step import batch_buckets
from smkern.ops.fp8 import dispatch as fp8_dispatch
from smkern.ops.gemm.dispatch import of_step, offline_dispatcher
from smkern.profile import Profile, load_profile
from smkern.tuning.config import GemmProblem
from smkern.tuning.constraints import OPTIONAL
from smkern.tuning.cost_constants import load_constants
from smkern.tuning.fp8 import ScaledProblem, Scales, ranked
from smkern.tuning.select import GEMM_FAMILY, rank

MAX_BATCH = 256
"""Requests of a forward, of which each has a row of logits."""
ROWS = sorted({*batch_buckets(MAX_BATCH)} | {padded_rows(rows) for rows in range(1, 8193)})
"""Rows of decode steps' graphs and of forwards with prompts."""


def likeliest(
    problems: Iterable[GemmProblem], budgets: Sequence[int], profile: Profile, top: int
) -> Iterator[Variant]:
    """The variants that the model holds for the `top` fastest of each problem in each budget.

    As dispatch asks it: for the step of rows (`model_rows`) of a problem.
    """
    constants = load_constants(profile.info.name, profile.info.capability)
    for problem, num_sms in product(problems, budgets):
        budget, seen = Budget(num_sms, "mask", True), set[Variant]()
        step = of_step(problem)
        for item in rank(step, budget, profile, kernels=("cutlass",), constants=constants):
            seen.add(variant_of(problem, item.config(), profile.info.sm))
            if len(seen) == top:
                break
        yield from seen


def likeliest_in_e4m3(
    problems: Iterable[ScaledProblem], budgets: Sequence[int], profile: Profile, top: int
) -> Iterator[ScaledVariant]:
    """The same of products of e4m3; none for rows that these kernels do not serve."""
    for problem, num_sms in product(problems, budgets):
        step, seen = fp8_dispatch.of_step(problem), set[ScaledVariant]()
        for _, config in sorted(ranked(step, Budget(num_sms, "mask", True), profile, "cutlass")):
            seen.add(scaled_variant_of(problem, config, profile.info.sm))
            if len(seen) == top:
                break
        yield from seen


def of_model(config: ModelConfig, profile: Profile) -> Iterator[Kernel]:
    """The variants that dispatch takes for a model's forwards, of any rows on any even SM count.

    By the device's tuned tables, then the cost model, as if all could be compiled.
    """
    dispatcher = offline_dispatcher(profile, GEMM_FAMILY.load(profile))
    scaled, capability = fp8_dispatch.offline_dispatcher(profile), profile.info.capability
    for budget, rows in product(budgets_of(profile.info.num_sms), ROWS):
        for problem in problems_of(config, rows, min(rows, MAX_BATCH)):
            problem = settled_problem(problem, budget, dispatcher)
            chosen = dispatcher.select(problem, budget).config
            if chosen.kernel in OPTIONAL:
                yield variant_of(problem, chosen, profile.info.sm)
        for in_e4m3 in scaled_problems_of(config, rows, capability):
            by = scaled.select(in_e4m3, budget)
            if by.kernel in OPTIONAL:
                yield scaled_variant_of(in_e4m3, by, profile.info.sm)


@click.command("build")
@click.option(
    "--model",
    help="A preset: all that its forwards take, not --shapes, --ms, --budgets and the like.",
)
@click.option("--gpu", help="Whose tables and cost model.  [default: this GPU's, else an H200's]")
@click.option("--shapes", type=ShapeList(), default=SHAPES, help="Weights, as NxK,NxK.")
@click.option("--ms", type=IntList(), default=MS, help="Rows of the activations.")
@click.option("--budgets", type=IntList(), default=BUDGETS, help="SM counts.")
@click.option(
    "--epilogue",
    "epilogues",
    multiple=True,
    default=["none"],
    show_default=True,
    help="none, swiglu, or bias, residual, silu, gelu joined by +.",
)
@click.option(
    "--scales",
    type=click.Choice(["block", "row"]),
    help="Of products of e4m3 by --shapes: blocks, or rows and matrices.  [default: bf16]",
)
@click.option(
    "--top",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of each product, as many as the model holds for the fastest.",
)
@click.option("--workers", type=click.IntRange(1), help="Compilers.  [default: CPUs]")
@click.option("--cpp", is_flag=True, help="CUTLASS's C++ GEMMs instead, by nvcc: bench cutlass.")
def command(
    model: str | None, gpu: str | None, shapes: Sequence[Shape], ms: Sequence[int],
    budgets: Sequence[int], epilogues: Sequence[str], scales: Scales | None, top: int,
    workers: int | None, cpp: bool,
) -> None:  # fmt: skip
    """Compile the kernels in CUTLASS's Python DSL that dispatch would take; needs no GPU.

    The cubins lie in smkern's cache (XDG_CACHE_HOME moves it) under a hash of what they were
    compiled from: copy that folder to a machine without the DSL, and its kernels serve there.
    """
    begin = time.perf_counter()
    if cpp:
        library = cpp_build.build()
        click.echo(f"CUTLASS's C++ GEMMs in {time.perf_counter() - begin:.0f} s: {library}")
        return
    if reason := absent():
        raise DeviceError(reason)
    sizes = product(shapes, map(parse_epilogue, epilogues), ms)
    profile = load_profile(gpu and gpu_folder(gpu))
    wanted: Iterator[Kernel]
    if model:
        wanted = of_model(preset(model), profile)
    elif scales:
        asked = (ScaledProblem(m, *w, epilogue=each, scales=scales) for w, each, m in sizes)
        wanted = likeliest_in_e4m3(asked, budgets, profile, top)
    else:
        plain = (GemmProblem(m, *w, epilogue=each) for w, each, m in sizes)
        wanted = likeliest(plain, budgets, profile, top)
    made = compile_many(
        wanted,
        workers=workers or len(os.sched_getaffinity(0)),
        done=lambda done, total: click.echo(f"{done} of {total}"),
    )
    folder = cubin_path("cute", "").parent
    click.echo(f"{made} kernels for {ARCH} in {time.perf_counter() - begin:.0f} s: {folder}")
