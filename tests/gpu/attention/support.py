"""What the attention tests share beside cases and the truth: calls, plans, compilation ahead."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest

import smkern
from smkern.errors import ArgumentError
from smkern.kernels.attention.args import WorkspaceLayout
from smkern.kernels.attention.items import PlanLayout
from smkern.kernels.attention.launch import AttentionKernels
from smkern.kernels.attention.triton_compile import default_config
from smkern.ops.operator_dispatch import Compile
from smkern.tuning.attention.shapes import AttentionConfig
from tests.gpu.attention.cases import Case, Step, make_step
from tests.gpu.attention.truth import check
from tests.gpu.compiling import compile_shared
from tests.gpu.gemm_support import capability

BACKENDS = ("cuda", "triton")
RAGGED = (1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 600)
"""Lengths on both sides of pages, tiles and pieces."""
MIXED = Case(kv_lens=(300, 64, 700, 0, 40, 1, 2100), q_lens=(1, 64, 33, 0, 40, 1, 8), page_size=16)
"""Decode, prefill, chunked prefill, nothing, a whole prompt, a first token and verification."""


def make_plan(step: Step, **options: Any) -> Any:
    """A plan for a step by the public operator; `options` override (num_sms=, out=, ...)."""
    case = step.case
    numbers = {
        "num_q_heads": case.q_heads, "num_kv_heads": case.kv_heads, "head_dim": case.head_dim,
        "page_size": case.page_size, "cu_q_lens": step.cu_q_lens, "max_q_len": case.longest_q,
        "max_kv_len": max(1, *case.kv_lens, 1), "causal": case.causal, "window": case.window,
        "num_tokens": case.num_tokens,
    }  # fmt: skip
    return smkern.plan_attention(step.kv_lens, **(numbers | options))


def attend(step: Step, **options: Any) -> None:
    """Attention of a step into its outputs; a skip where the backend asked for cannot run it."""
    try:
        got = smkern.paged_attention(
            step.q, step.k_cache, step.v_cache, step.page_table, step.kv_lens,
            out=step.out, lse=step.lse, return_lse=True, **(step.options() | options),
        )  # fmt: skip
    except ArgumentError as error:
        backend = options.get("backend")
        if backend and repr(backend) in str(error) and "cannot run" in str(error):
            pytest.skip(str(error))
        raise
    assert got[0] is step.out
    assert got[1] is step.lse


def run(case: Case, seed: int | None = None, *, sharp: float = 2.0, **options: Any) -> Step:
    """Make a step, run it with the operator's own plan, and check it."""
    step = make_step(case, seed, sharp=sharp)
    attend(step, **options)
    check(step)
    return step


def poison_partials(plan: Any) -> None:
    """Fill a plan's room for partials with NaN bytes: no launch may read what it did not write."""
    plan.workspace[WorkspaceLayout.of(plan.shape).decode_out :].fill_(255)


def counters_are_zero(plan: Any) -> bool:
    """Whether all that a launch counts by is as the next one wants to find it."""
    count = PlanLayout.of(plan.shape).num_counters * plan.shape.num_kv_heads
    return not (plan.workspace[: 4 * count].any() or plan.buffer[8:64].any())


def config_of(case: Case, backend: str | None) -> AttentionConfig:
    """What a case runs by for a backend (None: what dispatch takes here)."""
    if backend != "triton":
        return AttentionConfig("cuda")
    return default_config(case.problem, "prefill" if case.shape.has_prefill else "decode")


def compile_or_tell(task: Compile) -> None:
    """Compile; what goes wrong, the test that needs the kernel will meet."""
    try:
        task()
    except Exception as error:  # noqa: BLE001
        print(f"{task}: {error}")


def precompile(wanted: Iterable[tuple[Case, str | None]]) -> None:
    """Compile in parallel what tests will launch; the rest is loading."""
    kernels = AttentionKernels(capability())
    variants = {
        each
        for case, backend in wanted
        for each in kernels.variants(case.problem, config_of(case, backend))
    }
    compile_shared(partial(compile_or_tell, Compile(each)) for each in sorted(variants, key=repr))
