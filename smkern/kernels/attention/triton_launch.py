"""Launches of the Triton attention kernel, through the driver or in the interpreter on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

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
    compile_triton,
    compile_variant,
    default_config,
    variants_of,
)
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, Budget

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "compile_triton", "default_config", "launch_interpreted",
    "prepare_triton", "variants_of",
]  # fmt: skip


_FORMAT = f"{len(POINTERS)}Q{len(STRIDES)}q{len(NUMBERS)}q" + "f4x" * 4 + "Q2q"
"""Run-time parameters in the kernel's order, 8 bytes each."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """One kernel of a launch: its grid, and its byte offsets in the plan and the workspace."""

    variant: AttentionVariant
    num_ctas: int
    count: int
    items: int
    counters: int
    partials: int
    stats: int


def _passes(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: int,
    aligned: bool,
) -> list[_Pass]:  # fmt: skip
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
        found.append(_Pass(variant, ctas, 4 * count, 4 * first, space.counters, partials, stats))
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
    for step in _passes(problem, config, budget, capability, aligned):
        kernels.load(step.variant, partial(compile_variant, step.variant))
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


def _values(step: _Pass, kv_heads: int, window: int, a: AttentionArguments) -> tuple[Any, ...]:
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


def launch_interpreted(
    problem: AttentionProblem,
    config: AttentionConfig,
    budget: Budget,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    plan_buffer: Tensor,
    workspace: Tensor,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    page_indptr: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    out_scale: Tensor | None = None,
) -> list[int]:
    """The same launch in Triton's interpreter, on CPU tensors; needs TRITON_INTERPRET=1.

    Args:
        q: [tokens, q_heads, head_dim] fp16 (the interpreter gets bf16 wrong); same for `out`.
        k_cache: [pages, page_size, kv_heads, head_dim] fp16 or float8_e4m3fn; same for `v_cache`.
        page_table: [batch, max_pages] int32, or [total] with `page_indptr` [batch + 1].
        plan_buffer: int32, as `plan_items` returns it.
        workspace: uint8 [WorkspaceLayout.num_bytes], its counters zero.
        lse: [tokens, q_heads] fp32; sinks: [q_heads] fp32; scales of fp8 caches: 1-element tensors
            or floats.
        out_scale: fp32 [tokens, columns / 128], of an `out` in e4m3.

    Returns:
        Number of CTAs of each kernel launched.
    """
    import torch

    from smkern.kernels.attention.triton_device import attention_items

    absent, absent_int = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    k_tensor, k_factor = (absent, k_scale) if isinstance(k_scale, float) else (k_scale, 1.0)
    v_tensor, v_factor = (absent, v_scale) if isinstance(v_scale, float) else (v_scale, 1.0)
    if problem.cache_dtype == "fp8":
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    flat = page_indptr is not None
    passes = _passes(problem, config, budget, capability=80, aligned=False)
    for step in passes:
        attention_items[(step.num_ctas,)](
            q, k_cache, v_cache, out, absent if lse is None else lse, page_table,
            page_indptr if flat else absent_int, absent if sinks is None else sinks,
            k_tensor, v_tensor, plan_buffer[step.count // 4 :], plan_buffer[step.items // 4 :],
            *(_typed(workspace, at, dtype) for at, dtype in (
                (step.counters, torch.int32), (step.partials, torch.float32),
                (step.stats, torch.float32),
            )),
            *q.stride()[:2], *out.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
            0 if flat else page_table.stride(0), page_table.shape[-1], k_cache.shape[0],
            q.shape[0], problem.shape.num_kv_heads, problem.shape.window, int(lse is not None),
            int(flat), int(k_tensor is not absent), int(v_tensor is not absent),
            problem.shape.head_dim**-0.5 if scale is None else scale, softcap, k_factor, v_factor,
            *((absent, 0, 0) if out_scale is None else (out_scale, *out_scale.stride())),
            **step.variant.constants,
        )  # fmt: skip
    return [step.num_ctas for step in passes]


def _typed(workspace: Tensor, at: int, dtype: Any) -> Tensor:
    """The workspace from byte `at`; a valid pointer even if nothing is left."""
    rest = workspace[at:]
    return (rest if rest.numel() >= 4 else workspace.new_zeros(4)).view(dtype)
