"""Small attention cases for the interpreter: inputs full of poison, an fp64 answer, a run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

import torch
from torch import Tensor

from smkern.kernels.attention.args import WorkspaceLayout
from smkern.kernels.attention.items import plan_items
from smkern.kernels.attention.triton_device import attention_items
from smkern.kernels.attention.triton_launch import passes
from smkern.ops.reference.fp8 import dequantize
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget
from tests.ops.attention import cases
from tests.ops.attention.by_hand import attention_by_hand


@dataclass(frozen=True, slots=True)
class Case:
    """One step: requests of (query tokens, length), heads, and options."""

    requests: tuple[tuple[int, int], ...] = ((1, 40),)
    q_heads: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    page_size: int = 16
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    fp8: bool = False
    flat: bool = False
    scaled: bool = False
    scale: float | None = None
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0

    @property
    def kv_lens(self) -> list[int]:
        return [kv_len for _, kv_len in self.requests]

    @property
    def cu_q_lens(self) -> list[int]:
        return [*accumulate((q_len for q_len, _ in self.requests), initial=0)]

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(
            batch=len(self.requests),
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            max_q_len=max(1, *(q_len for q_len, _ in self.requests)),
            max_kv_len=max(1, *self.kv_lens),
            max_tokens=self.cu_q_lens[-1],
            max_total_kv=sum(self.kv_lens),
            causal=self.causal,
            window=self.window,
        )

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            self.shape, "fp16", "fp8" if self.fp8 else "fp16", self.softcap > 0, self.sinks,
            self.scaled,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a case; `keys` and `values` per request are what the pages hold of it."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    page_indptr: Tensor | None
    sinks: Tensor | None
    keys: list[Tensor]
    values: list[Tensor]


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Random queries and shuffled pages; NaN in unused pages and in keys that nobody sees."""
    torch.manual_seed(seed)
    made = cases.make(
        cases.Case(
            case.requests, case.q_heads, case.kv_heads, case.head_dim, case.page_size,
            cache_dtype=cases.FP8 if case.fp8 else None, flat=case.flat,
            options={"sinks": True} if case.sinks else {},
        )
    )  # fmt: skip
    q, *caches, table, _ = made.args
    indptr = made.options.get("page_indptr")
    for request, (q_len, kv_len) in enumerate(case.requests):
        unseen = torch.arange(max(0, kv_len - q_len - case.window + 1) if case.window else 0)
        pages = table[request] if indptr is None else table[indptr[request] :]
        for cache in caches if len(unseen) else ():
            cache[pages[unseen // case.page_size].long(), unseen % case.page_size] = torch.nan
    if indptr is None:
        table[table < 0] = 1 << 30
        table[:, -1] = -5
    else:
        table = torch.cat([table, table.new_tensor([-5])])
    sinks = made.options.get("sinks")
    return Inputs(q, *caches, table, indptr, sinks, made.keys, made.values)


def answer(case: Case, given: Inputs) -> tuple[Tensor, Tensor]:
    """out [tokens, q_heads, d] and lse [tokens, q_heads] in fp64."""
    return attention_by_hand(
        given.q, given.keys, given.values, starmap(range, pairwise(case.cu_q_lens)),
        causal=case.causal, scale=case.scale, window=case.window, softcap=case.softcap,
        sinks=given.sinks, k_scale=case.k_scale, v_scale=case.v_scale,
    )  # fmt: skip


DECODE = AttentionConfig("triton", keys=32, num_warps=1, num_stages=2)
PREFILL = AttentionConfig("triton", keys=64, num_warps=4, num_stages=2)


def run(
    case: Case, given: Inputs, budget: Budget | None = None, config: AttentionConfig | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of the interpreted kernel; checks that the counters are zero again.

    Output in e4m3 comes back as what it stands for.
    """
    budget = budget or Budget(3, "grid")
    shape, problem = case.shape, case.problem
    if config is None:
        config = PREFILL if shape.has_prefill else DECODE
    plan = torch.from_numpy(plan_items(shape, case.kv_lens, case.cu_q_lens, budget.num_sms))
    layout = WorkspaceLayout.of(shape)
    workspace = torch.full((layout.num_bytes,), 0xFF, dtype=torch.uint8)  # NaN as fp32
    workspace[: layout.decode_out] = 0
    out = torch.full_like(given.q, torch.nan)
    lse = torch.full(given.q.shape[:2], torch.nan)
    out_scale = None
    if case.scaled:
        out = torch.zeros(given.q.shape, dtype=torch.float8_e4m3fn)
        out_scale = torch.full((len(out), out[0].numel() // 128), torch.nan)
    q, table, indptr, absent = given.q, given.page_table, given.page_indptr, torch.zeros(1)
    caches = [x.view(torch.uint8) if case.fp8 else x for x in (given.k_cache, given.v_cache)]
    scales = [
        (x, 1.0) if isinstance(x, Tensor) else (absent, x) for x in (case.k_scale, case.v_scale)
    ]
    steps = passes(problem, config, budget, capability=80, aligned=False)
    for step in steps:
        attention_items[(step.num_ctas,)](
            q, *caches, out, lse, table, plan if indptr is None else indptr,
            absent if given.sinks is None else given.sinks, *(x for x, _ in scales),
            plan[step.count // 4 :], plan[step.items // 4 :],
            typed(workspace, step.counters, torch.int32),
            typed(workspace, step.partials, torch.float32),
            typed(workspace, step.stats, torch.float32),
            *q.stride()[:2], *out.stride()[:2], *(x for each in caches for x in each.stride()[:3]),
            0 if case.flat else table.stride(0), table.shape[-1], len(caches[0]), len(q),
            case.kv_heads, case.window, 1, int(case.flat),
            *(int(x is not absent) for x, _ in scales),
            case.head_dim**-0.5 if case.scale is None else case.scale, case.softcap,
            *(factor for _, factor in scales),
            *((absent, 0, 0) if out_scale is None else (out_scale, *out_scale.stride())),
            **step.variant.constants,
        )  # fmt: skip
    per_sm = config.ctas_per_sm if budget.confined == "mask" else 1
    assert steps[0].num_ctas <= budget.num_sms * per_sm
    assert not workspace[: layout.decode_out].any()
    if out_scale is not None:
        out = dequantize(out.flatten(1), out_scale).view(out.shape)
    return out, lse


def typed(workspace: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    """The workspace from byte `at`; a valid pointer even if nothing is left."""
    rest = workspace[at:]
    return (rest if rest.numel() >= 4 else workspace.new_zeros(4)).view(dtype)


def check(case: Case, budget: Budget | None = None, config: AttentionConfig | None = None) -> None:
    """The interpreted kernel's values against fp64's."""
    given = inputs(case)
    out, lse = run(case, given, budget, config)
    exact_out, exact_lse = answer(case, given)
    torch.testing.assert_close(out.double(), exact_out, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-3, rtol=1e-3)
