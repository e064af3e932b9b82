"""Launches of the Triton attention kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.kernels.aot import KernelSet
from smkern.kernels.attention.args import (
    NUM_ADDRESSES,
    AttentionArguments,
    Bind,
    Launch,
    WorkspaceLayout,
)
from smkern.kernels.attention.items import NUM_DECODE, NUM_PREFILL, PlanLayout
from smkern.kernels.attention.triton_compile import (
    NUMBERS,
    POINTERS,
    STRIDES,
    AttentionVariant,
    default_config,
    variants_of,
)
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, Budget

_FORMAT = f"{len(POINTERS)}Q{len(STRIDES)}q{len(NUMBERS)}q" + "f4x" * 4 + "Q2q"
"""Run-time parameters in the kernel's order, 8 bytes each."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One kernel of a launch: its grid, and its byte offsets in the plan and the workspace."""

    variant: AttentionVariant
    num_ctas: int
    count: int
    items: int
    counters: int
    partials: int
    stats: int


def passes(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: int,
    aligned: bool,
) -> list[Pass]:  # fmt: skip
    """The kernels of a launch, in order."""
    shape = problem.shape
    plan, space = PlanLayout.of(shape), WorkspaceLayout.of(shape)
    found = []
    for variant in variants_of(problem, config, capability, aligned):
        if variant.path == "prefill":
            chosen, items = config, shape.max_prefill_items
            places = (NUM_PREFILL, plan.prefill_at, space.prefill_out, space.prefill_stats)
        else:
            beside = shape.has_prefill
            chosen = default_config(problem, "decode", capability) if beside else config
            items = shape.max_decode_items
            places = (NUM_DECODE, plan.decode_at, space.decode_out, space.decode_stats)
        count, first, partials, stats = places
        allowed = budget.most_ctas(chosen.ctas_per_sm)
        ctas = max(1, min(allowed, items * variant.tiles * shape.num_kv_heads))
        found.append(Pass(variant, ctas, 4 * count, 4 * first, space.counters, partials, stats))
    return found


def prepare_triton(
    problem: AttentionProblem,
    config: AttentionConfig,
    budget: Budget,
    capability: int,
    kernels: KernelSet,
    aligned: bool = True,
) -> Bind:
    """Returns bind(sizes) for launches of `problem` within `budget`; loads new kernels.

    `kernels` belongs to a device and may be shared by all its launches. `aligned`: whether the
    calls are (`is_aligned`).
    """
    runs = []
    for step in passes(problem, config, budget, capability, aligned):
        kernels.load(step.variant, step.variant.compile)
        runs.append((step, kernels.bind(step.variant, _FORMAT, step.num_ctas, overlap=False)))
    kv_heads, window = problem.shape.num_kv_heads, problem.shape.window

    def bind(sizes: tuple[Any, ...]) -> Launch:
        def launch(stream: int, *addresses: int) -> None:
            arguments = AttentionArguments.of(addresses[:NUM_ADDRESSES], sizes)
            scales = (addresses[-1] if problem.scaled else 0, *arguments.scale_steps)
            for step, run in runs:
                run(stream, *_values(step, kv_heads, window, arguments), *scales)

        return launch

    return bind


def is_aligned(arguments: AttentionArguments, problem: AttentionProblem) -> bool:
    """Whether rows of q, out and the caches are multiples of 16 bytes."""
    a, kv_unit = arguments, 16 if problem.cache_dtype == "fp8" else 8
    return not (
        (a.q | a.k | a.v | a.out) % 16
        or any(stride % 8 for stride in (*a.q_strides, *a.out_strides))
        or any(stride % kv_unit for stride in (*a.k_strides, *a.v_strides))
    )


def _values(step: Pass, kv_heads: int, window: int, a: AttentionArguments) -> tuple[Any, ...]:
    """The kernel's run-time parameters in order; absent ones are 0 and never read."""
    q_unit, kv_unit = step.variant.q_unit, step.variant.kv_unit
    return (
        a.q, a.k, a.v, a.out, a.lse, a.page_table, a.page_indptr, a.sinks, a.k_scale_ptr,
        a.v_scale_ptr, a.plan + step.count, a.plan + step.items, a.workspace + step.counters,
        a.workspace + step.partials, a.workspace + step.stats,
        *(stride // q_unit for stride in (*a.q_strides, *a.out_strides)),
        *(stride // kv_unit for stride in (*a.k_strides, *a.v_strides)),
        0 if a.page_indptr else a.table_stride, a.table_len, a.num_pages, a.num_tokens,
        kv_heads, window, a.lse != 0, a.page_indptr != 0, a.k_scale_ptr != 0, a.v_scale_ptr != 0,
        a.scale, a.softcap, a.k_scale, a.v_scale,
    )  # fmt: skip
