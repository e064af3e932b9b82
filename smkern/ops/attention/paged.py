"""Paged attention with an SM budget: the public operators."""

from __future__ import annotations

from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.kernels.attention.args import (
    ALIGNMENT,
    NUM_ADDRESSES,
    AttentionArguments,
    WorkspaceLayout,
)
from smkern.kernels.attention.items import PlanLayout
from smkern.kernels.attention.triton_launch import is_aligned
from smkern.limits import check_fp8_capability
from smkern.ops.aliasing import pointer
from smkern.ops.attention import library
from smkern.ops.attention.call import Call, check_call, problem_of, results_of, shape_of, sizes_of
from smkern.ops.attention.check import check_memory
from smkern.ops.attention.dispatch import AttentionDispatcher, attention_dispatcher
from smkern.ops.attention.plan import Plan, PlanNumbers, check_place, shape_of_plan
from smkern.ops.attention.plan_eager import host_budget, plan_here
from smkern.ops.attention.plan_library import plan_through_library
from smkern.ops.checks import as_flag
from smkern.ops.operator import Bound, Operator, Part
from smkern.ops.operator_eager import run_here
from smkern.ops.operator_library import entry
from smkern.ops.reference import attention as reference
from smkern.tuning.attention.shapes import AttentionProblem, Budget

_PLAIN = frozenset({Tensor, Parameter, NoneType})
_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack


def prepare(
    dispatcher: AttentionDispatcher, call: Call, problem: AttentionProblem, budget: Budget,
    capturing: bool,
) -> Bound:  # fmt: skip
    """The launch of a call; without a plan it makes one first, in memory of its own."""
    if problem.scaled:
        check_fp8_capability(dispatcher.profile.info.sm)
    shape, sizes = problem.shape, sizes_of(call)
    if call.plan is not None:
        check_place(call.plan, budget, call.q.device, "plan")
    if not (shape.batch and call.q.shape[0]):
        return Bound(None)
    operands = (call.q, call.k_cache, call.v_cache, call.out)
    some = AttentionArguments.of([*(pointer(x) for x in operands), *[0] * 8], sizes)
    config = dispatcher.config(problem, budget, call.backend, some)
    bind = dispatcher.launch(
        problem, config, budget, capturing=capturing, aligned=is_aligned(some, problem)
    )
    launch = bind(sizes)
    if call.plan is not None:
        return Bound(launch)
    make_plan = dispatcher.plan(shape, budget, capturing=capturing)
    at = -(-4 * PlanLayout.of(shape).words // ALIGNMENT) * ALIGNMENT

    def planned(stream: int, *addresses: int) -> None:
        kv_lens, cu_q_lens, scratch = addresses[NUM_ADDRESSES : NUM_ADDRESSES + 3]
        make_plan(kv_lens, cu_q_lens, scratch, scratch + at, stream)
        launch(
            stream, *addresses[: NUM_ADDRESSES - 2], scratch, scratch + at,
            *addresses[NUM_ADDRESSES:],
        )  # fmt: skip

    return Bound(planned, scratch_bytes=at + WorkspaceLayout.of(shape).num_bytes)


def by_reference(call: Call) -> tuple[Tensor, Tensor | None]:
    """The reference on a checked call; a plan is checked and not needed."""
    shape = shape_of(call)
    if call.plan is not None:
        check_place(call.plan, host_budget(call.num_sms), call.q.device, "plan")
    numbers: dict[str, Any] = {
        name: x if x is None or isinstance(x, Tensor) else float(x)
        for name, x in call._asdict().items()
        if name in ("scale", "softcap", "k_scale", "v_scale")
    }
    out, lse = reference.paged_attention(
        call.q, call.k_cache, call.v_cache, call.page_table, call.kv_lens,
        page_indptr=call.page_indptr, cu_q_lens=call.cu_q_lens, max_q_len=shape.max_q_len,
        max_kv_len=shape.max_kv_len, causal=shape.causal, window=shape.window or None,
        sinks=call.sinks, out=call.out, lse=call.lse, out_scale=call.out_scale, **numbers,
    )  # fmt: skip
    return out, lse if call.return_lse or call.lse is not None else None


_TENSORS = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor kv_lens"
_OPTIONS = (
    "Tensor? page_indptr=None, Tensor? cu_q_lens=None, Tensor? sinks=None, float? k_scale=None, "
    "float? v_scale=None, Tensor? k_scale_tensor=None, Tensor? v_scale_tensor=None, "
    "bool causal=True, bool return_lse=False, bool check=False"
)
_ARGUMENTS = (
    "stream", "q", "k_cache", "v_cache", "out", "lse", "page_table", "page_indptr", "sinks",
    "k_scale", "v_scale", "plan.buffer", "plan.workspace", "kv_lens", "cu_q_lens", "scratch",
)  # fmt: skip
_attention = partial(
    Operator,
    call=Call,
    results=("out", "lse"),
    check=check_call,
    shapes=results_of,
    problem=problem_of,
    reference=by_reference,
    dispatcher=attention_dispatcher,
    vectors=("q", "k_cache", "v_cache", "out"),
    parts={"plan": Part(Plan, "key", ("buffer", "workspace"))},
    left_out=("lse",),
    prepare=prepare,
    check_memory=check_memory,
    through_library=library.through_library,
)
ATTENTION: Operator[AttentionProblem] = _attention(
    name="paged_attention",
    schema=f"{_TENSORS}, *, {_OPTIONS}",
    arguments=_ARGUMENTS,
    unkeyed=("check", "out_scale"),
)
SCALED_ATTENTION: Operator[AttentionProblem] = _attention(
    name="scaled_paged_attention",
    schema=f"{_TENSORS}, Tensor(a!) out_scale, *, {_OPTIONS}",
    arguments=(*_ARGUMENTS, "out_scale"),
    unkeyed=("check",),
)
"""Writes e4m3 and its scales: an operator of its own, so that the other looks for none."""
LIBRARY = library.register(partial(run_here, ATTENTION), partial(run_here, SCALED_ATTENTION))
_paged_attention = entry(ATTENTION)
_scaled_attention = entry(SCALED_ATTENTION)


def plan_attention(
    kv_lens: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    cu_q_lens: Tensor | None = None,
    max_q_len: int = 1,
    max_kv_len: int,
    causal: bool = True,
    window: int | None = None,
    num_tokens: int | None = None,
    max_total_kv: int | None = None,
    out: Plan | None = None,
    check: bool = False,
    num_sms: int | None = None,
) -> Plan:
    """Deal the KV work of a step to the CTAs of a budget, on the device, once for all layers.

    One launch; lengths are not read on the host. All sizes come from the host numbers, so the plan
    made in a captured graph serves other lengths at each replay. What exceeds the numbers is not
    attended to: a length counts as `max_kv_len`, a request's tokens end at `max_q_len`, work beyond
    `max_total_kv` is dropped and its rows are not written (`check=True` names it).

    Args:
        kv_lens: [batch] int32, keys of each request, the new tokens included; batch is at most
            16384.
        num_q_heads: Query heads, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads; those of this device under tensor parallelism.
        head_dim: 64, 96, 128 or 256.
        page_size: 1, 16, 32, 64, 128 or 256 tokens.
        cu_q_lens: [batch + 1] int32, where each request's query tokens begin and the last end;
            None: one query token a request.
        max_q_len: No request has more query tokens.
        max_kv_len: No length is above it.
        causal: As in the attention calls.
        window: As in the attention calls.
        num_tokens: Bound of the query tokens of the step. None: batch * max_q_len.
        max_total_kv: Bound of the sum of `kv_lens`. None: batch * max_kv_len. A tight one (the
            cache's tokens) makes buffers small.
        out: A plan made with these numbers, to be made anew in place; nothing is allocated then.
        check: Read the lengths, and raise for what does not fit. Waits for the device.
        num_sms: SMs to deal to. None: all that the current stream's partition has.

    Returns:
        The plan: `out`, if given.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition; CPU
            tensors take any from 1, having no device to exceed.
        ArgumentError: numbers or tensors that cannot be; an `out` made with others.
        DeviceError: the GPU is older than sm_80.
        WarmupError: a graph capture met a kernel that is not loaded.

    Source: pieces of fixed length as in Flash-Decoding and FlashInfer (arXiv 2501.01005) section
    3.3, here cut from each request's start and dealt by the budget.

    Example:
        >>> import torch, smkern
        >>> lens = torch.tensor([300, 20], dtype=torch.int32)
        >>> plan = smkern.plan_attention(lens, num_q_heads=8, num_kv_heads=2, head_dim=64,
        ...                              page_size=16, max_kv_len=512, num_sms=16)
        >>> plan.budget.num_sms
        16
    """
    if check is not False:
        as_flag("check", check)
    given = PlanNumbers(
        num_q_heads, num_kv_heads, head_dim, page_size, max_q_len, max_kv_len, causal, window,
        num_tokens, max_total_kv,
    )  # fmt: skip
    if _is_compiling() and num_sms is None:
        # the stream's budget is a number that a graph must not keep
        return torch.compiler.disable(plan_here)(kv_lens, cu_q_lens, given, out, check, None)
    if kv_lens is None or not isinstance(kv_lens, Tensor):
        shape_of_plan(kv_lens, cu_q_lens, given)
    if (
        _is_compiling()
        or kv_lens.__class__ not in _PLAIN
        or cu_q_lens.__class__ not in _PLAIN
        or _num_modes()
        or not (kv_lens.is_cuda or kv_lens.is_cpu)
    ):
        return plan_through_library(kv_lens, cu_q_lens, given, out, check, num_sms)
    return plan_here(kv_lens, cu_q_lens, given, out, check, num_sms)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_indptr: Tensor | None = None,
    cu_q_lens: Tensor | None = None,
    max_q_len: int | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    plan: Plan | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    check: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
) -> Any:
    """Attention of ragged queries over a paged KV cache, on at most `num_sms` SMs.

    With s = scale * k_scale * q·k (softcap * tanh(s / softcap) where there is one) over the keys
    that a query sees: out = v_scale * softmax(s)·v, in fp32, rounded once. Query token t of a
    request's q_len is at position kv_len - q_len + t. A row's bits depend on its request alone, not
    on the batch nor the budget. There is no backward.

    Args:
        q: [tokens, q_heads, head_dim], bf16 or fp16 (fp32 on CPU tensors); inner stride 1.
        k_cache: [pages, page_size, kv_heads, head_dim], any strides with inner stride 1, in q's
            dtype or float8_e4m3fn. head_dim 64, 96, 128, 256; page_size 1, 16, 32, 64, 128, 256.
        v_cache: As k_cache.
        page_table: [batch, max_pages] int32, rows may be apart; or flat [total] with `page_indptr`.
            It may be narrower than the lengths that a plan allows. Entries behind a request's last
            key are not read; ids that are no pages, and lengths that the table cannot hold, give
            wrong numbers for their request, never a read out of bounds (`check=True` names them).
        kv_lens: [batch] int32, keys of each request, the new tokens included. 0 gives zeros. At
            most 16384 requests.
        page_indptr: [batch + 1] int32: where each request's pages begin in a flat table.
        cu_q_lens: [batch + 1] int32: where each request's query tokens begin and the last end.
            None: one query token a request. Tokens behind the last are not written.
        max_q_len: A bound of the query tokens of a request; needed with `cu_q_lens` unless the plan
            has it.
        causal: A query sees keys up to its position; else all.
        scale: Factor of the scores, above 0 (kernels scale a row's maximum, not its scores). None:
            head_dim ** -0.5.
        window: A query sees only keys above its position - window, itself included if causal.
        softcap: Scores are capped to its size, before masks. None: not.
        sinks: [q_heads] fp32, a logit a head that takes part in the denominator alone.
        k_scale: What keys of an fp8 cache are multiplied by: a number above 0, or one fp32 on the
            device. Queries are multiplied with such keys in fp16: bf16 ones up to 65,504 count.
        v_scale: What cached values are multiplied by, as k_scale; of any sign.
        plan: From `plan_attention` with this call's numbers: its lengths are the ones that count.
            None: the call makes one, sized by the whole table, with a launch of its own.
        out: [tokens, q_heads, head_dim] to write into, inner stride 1; overlaps nothing. With
            `out_scale` in e4m3.
        out_scale: Write e4m3, and its scales here, fp32 [tokens, q_heads * head_dim / 128]: bit for
            bit what `smkern.quantize(out, "block")` makes of 16-bit output. head_dim 128 or 256, or
            64 with an even number of query heads a KV head; sm_89 and later.
        lse: [tokens, q_heads] fp32, contiguous, to write the log-sum-exp (natural) into.
        return_lse: Return it too.
        check: Read lengths, table, scales and plan, and raise for the first row that is wrong.
            Waits for the device; not for captures.
        backend: None (tuned table, else cost model), "model" (no table), or a kernel's name. What
            the CUDA kernels cannot take (caches not 32-byte aligned, K and V of other strides)
            Triton's run; "cuda" raises there.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [tokens, q_heads, head_dim] in q's dtype, or e4m3 with `out_scale`: `out`, if given; with
        `return_lse` (out, lse).
        A query that sees no key has 0, and -inf or its sink.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition; CPU
            tensors take any from 1, having no device to exceed.
        ArgumentError: what cannot be served; a plan of other numbers, budget or device; overlaps.
        DeviceError: the GPU is older than sm_80, or than sm_89 and `out_scale` is given.
        PartitionError: the current stream's partition is closed.
        WarmupError: a graph capture met a kernel that is not loaded.

    Source: PagedAttention (arXiv 2309.06180) section 4, FlashAttention-2 (arXiv 2307.08691).

    Example:
        >>> import torch, smkern
        >>> cache, q = torch.ones(2, 16, 1, 64).bfloat16(), torch.ones(1, 2, 64).bfloat16()
        >>> table, lens = torch.tensor([[1]]).int(), torch.tensor([5]).int()
        >>> smkern.paged_attention(q, cache, cache, table, lens).unique().tolist()
        [1.0]
    """
    run = _paged_attention if out_scale is None else _scaled_attention
    result, log_sums = run(
        q, k_cache, v_cache, page_table, kv_lens, page_indptr, cu_q_lens, max_q_len, causal, scale,
        window, softcap, sinks, k_scale, v_scale, out_scale, plan, out, lse, return_lse, check,
        backend, num_sms,
    )  # fmt: skip
    return (result, log_sums) if return_lse else result
