"""The operators that `smkern autotune --op` tunes: the cases and budgets of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from smkern.autotune import append, attention, fp8, moe, sample
from smkern.autotune.attention_cases import MODELS, QUICK_MODELS, QUICK_STEPS, Heads, tuned_cases
from smkern.autotune.family import MeasuredFamily
from smkern.autotune.gemm import FAMILY, GemmCase
from smkern.autotune.shortlist import problems
from smkern.limits import MAX_SIZE
from smkern.measure.attention import BUDGETS, QUICK_BUDGETS
from smkern.measure.gemm import BUDGETS as GEMM_BUDGETS
from smkern.measure.gemm import MS, SHAPES, Shape
from smkern.tuning.config import Dtype, Epilogue

QUICK_SHAPES = ((4096, 4096),)
SWIGLU_SHAPES = ((14336, 4096), (12288, 4096), (17408, 5120), (25600, 5120))
"""(I, K) of Llama-3.1-8B and of Qwen3-8B, -14B and -32B."""
QUICK_MS = (16, 512)
QUICK_GEMM_BUDGETS = (32, 100)
WHOLE = MAX_SIZE
"""A budget that no device has: all of its SMs."""


@dataclass(frozen=True, slots=True)
class OperatorCells:
    """An operator's family, its cases, one operands after the other, and its usual budgets."""

    family: MeasuredFamily
    cases: Sequence[Any]
    budgets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command; defaults fill in whatever is None or empty."""

    quick: bool = False
    ms: Sequence[int] | None = None
    heads: Sequence[Heads] | None = None
    cache_dtype: Literal["bf16", "fp8"] = "bf16"
    shapes: Sequence[Shape] | None = None
    dtype: Dtype = "bf16"
    epilogues: Sequence[Epilogue] = (Epilogue(),)

    def sizes(self, usual: Sequence[int], quick: Sequence[int]) -> Sequence[int]:
        return self.ms or (quick if self.quick else usual)

    def work(self, family: MeasuredFamily, cases: Sequence[Any]) -> OperatorCells:
        return OperatorCells(family, cases, self.budgets(BUDGETS, QUICK_BUDGETS))

    def budgets(self, usual: Sequence[int], quick: Sequence[int]) -> Sequence[int]:
        return quick if self.quick else (*usual, WHOLE)


def _products(options: Options, *, swiglu: bool = False) -> OperatorCells:
    """With SwiGLU, shapes are I x K, and the weights [2 I, K]."""
    usual, quick = (SWIGLU_SHAPES, SWIGLU_SHAPES[:1]) if swiglu else (SHAPES, QUICK_SHAPES)
    shapes: Sequence[Shape] = options.shapes or (quick if options.quick else usual)
    epilogues = options.epilogues
    if swiglu:
        shapes, epilogues = [(2 * n, k) for n, k in shapes], [Epilogue(swiglu=True)]
    found = problems(shapes, options.sizes(MS, QUICK_MS), options.dtype, epilogues)
    budgets = options.budgets(GEMM_BUDGETS, QUICK_GEMM_BUDGETS)
    return OperatorCells(FAMILY, [GemmCase(problem) for problem in found], budgets)


def _scaled(options: Options) -> OperatorCells:
    """GEMMs of e4m3, with scales of blocks and of rows."""
    shapes = options.shapes or (QUICK_SHAPES if options.quick else SHAPES)
    budgets = options.budgets(GEMM_BUDGETS, QUICK_GEMM_BUDGETS)
    cases = fp8.cases_of(shapes, options.sizes(MS, QUICK_MS))
    return OperatorCells(fp8.FAMILY, cases, budgets)


def _attention(options: Options) -> OperatorCells:
    few = options.quick and not options.heads
    models, steps = (QUICK_MODELS, QUICK_STEPS) if few else (options.heads or MODELS, {})
    cases = tuned_cases(models, cache_dtype=options.cache_dtype, **steps)
    return options.work(attention.FAMILY, cases)


def _append(options: Options) -> OperatorCells:
    models = options.heads or (QUICK_MODELS if options.quick else MODELS)
    tokens = options.sizes(append.TOKENS, append.QUICK_TOKENS)
    cases = append.tuned_cases(models, cache_dtype=options.cache_dtype, tokens=tokens)
    return options.work(append.FAMILY, cases)


def _sample(options: Options) -> OperatorCells:
    cases = sample.tuned_cases(rows=options.sizes(sample.ROWS, sample.QUICK_ROWS))
    return options.work(sample.FAMILY, cases)


def _experts(options: Options, family: MeasuredFamily, ops: Sequence[moe.Op]) -> OperatorCells:
    tokens = options.sizes(moe.TOKENS, moe.QUICK_TOKENS)
    return options.work(family, moe.cases_of(ops, tokens))


OPERATORS: Mapping[str, Callable[[Options], OperatorCells]] = {
    "gemm": _products,
    "gemm_swiglu": partial(_products, swiglu=True),
    "gemm_fp8": _scaled,
    "attention": _attention,
    "append": _append,
    "sample": _sample,
    "moe": partial(_experts, family=moe.MOE, ops=moe.MOE_OPS),
    "grouped_gemm": partial(_experts, family=moe.GROUPED, ops=moe.GROUPED_OPS),
}
