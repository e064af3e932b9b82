"""The append of new keys and values with an SM budget: the public operators."""

from __future__ import annotations

import torch
from torch import Tensor

from smkern.kernels.append_launch import POINTERS
from smkern.ops.append.call import VECTORS, Call, check_append, check_call, numbers_of, problem_of
from smkern.ops.append.check import check_memory
from smkern.ops.append.dispatch import append_dispatcher
from smkern.ops.operator import Operator
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import append as reference
from smkern.tuning.append import AppendProblem

_KV = (
    "Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, Tensor kv_lens"
)
_WHERE = (
    "Tensor? page_indptr=None, Tensor? cu_q_lens=None, float? k_scale=None, float? v_scale=None, "
    "Tensor? k_scale_tensor=None, Tensor? v_scale_tensor=None, bool check=False"
)
_TURN = (
    "Tensor? cos_sin=None, bool interleaved=False, Tensor? q_norm=None, Tensor? k_norm=None, "
    "float eps=1e-06, Tensor? positions=None"
)
_FIELDS = {"table_ptr": "page_table", "indptr_ptr": "page_indptr", "lens_ptr": "kv_lens",
           "cu_ptr": "cu_q_lens", "k_scale_ptr": "k_scale", "v_scale_ptr": "v_scale"}  # fmt: skip
_LAUNCHED = tuple(_FIELDS.get(name, name.removesuffix("_ptr")) for name in POINTERS)
_TURNING = ("q", "out", "cos_sin", "q_norm", "k_norm", "positions")


def by_reference(call: Call) -> Tensor | None:
    """The reference on a checked call of either operator; into `out`, if it has one."""
    where = {
        "page_indptr": call.page_indptr,
        "cu_q_lens": call.cu_q_lens,
        "k_scale": call.k_scale,
        "v_scale": call.v_scale,
    }
    if call.plain:
        if call.kv_lens.shape[0]:
            reference.append_kv(*call[1:7], **where)
        return None
    if not call.kv_lens.shape[0]:
        return torch.zeros_like(call.q) if call.out is None else call.out
    return reference.qk_norm_rope_append(
        *call[:7], cos_sin=call.cos_sin, interleaved=bool(call.interleaved),
        q_norm=call.q_norm, k_norm=call.k_norm, eps=float(call.eps), positions=call.positions,
        out=call.out, **where,
    )  # fmt: skip


APPEND: Operator[AppendProblem] = Operator(
    name="qk_norm_rope_append",
    call=Call,
    schema=f"Tensor q, {_KV}, *, {_TURN}, {_WHERE}",
    results=("out",),
    check=check_append,
    shapes=lambda call: ((tuple(call.q.shape), call.q.dtype),),
    problem=problem_of,
    numbers=numbers_of,
    reference=by_reference,
    dispatcher=append_dispatcher,
    vectors=VECTORS,
    in_place=(("out", "q"),),
    anchor="k_cache",
    arguments=("stream", *_LAUNCHED),
    unkeyed=("check",),
    check_memory=check_memory,
    in_place_name="qk_norm_rope_append_",
)
APPEND_KV: Operator[AppendProblem] = Operator(
    name="append_kv",
    call=Call,
    schema=f"{_KV}, *, {_WHERE}",
    results=(),
    check=check_call,
    shapes=lambda call: (),
    problem=problem_of,
    numbers=numbers_of,
    reference=by_reference,
    dispatcher=append_dispatcher,
    vectors=("k", "v", "k_cache", "v_cache"),
    anchor="k_cache",
    arguments=("stream", *("0" if name in _TURNING else name for name in _LAUNCHED)),
    unkeyed=("check", *_TURNING, "interleaved", "eps"),
    check_memory=check_memory,
)
LIBRARY = register(APPEND, APPEND_KV)
_qk_norm_rope_append, _append_kv = entry(APPEND), entry(APPEND_KV)


def qk_norm_rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    cos_sin: Tensor | None = None,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    positions: Tensor | None = None,
    page_indptr: Tensor | None = None,
    cu_q_lens: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    check: bool = False,
    num_sms: int | None = None,
) -> Tensor:
    """Norm and turn q and k, and write K and V into their pages, in one pass on `num_sms` SMs.

    With x a head of q or k: y = x / sqrt(mean(x²) + eps) * weight, then pair i of the first
    rotary_dim dimensions turns by the angle whose cosine and sine are in `cos_sin` at the token's
    position; in fp32, rounded once. An fp8 cache holds y / scale, saturated. The tensors are those
    of `smkern.paged_attention`: token t of a request's q_len is at position kv_len - q_len + t and
    goes to slot position % page_size of its page position // page_size. A token that has no page (a
    wrong id, an entry behind the table, a negative position) is not written; nothing else is
    touched. A row's bits depend on the row alone. There is no backward.

    Args:
        q: [tokens, q_heads, head_dim], bf16 or fp16 (fp32 on CPU tensors), inner stride 1; q, k and
            v may be views of one qkv matrix. head_dim 64, 96, 128 or 256.
        k: [tokens, kv_heads, head_dim], as q. It is not changed.
        v: As k.
        k_cache: [pages, page_size, kv_heads, head_dim], any strides with inner stride 1, in q's
            dtype or float8_e4m3fn; written. page_size 1, 16, 32, 64, 128 or 256.
        v_cache: As k_cache.
        page_table: [batch, max_pages] int32, rows may be apart; or flat [total] with `page_indptr`.
            Requests must not share a page that is written.
        kv_lens: [batch] int32, keys of each request, the new tokens included.
        cos_sin: [max_position, rotary_dim] fp32 or q's dtype, from `Rope.table`: cosines, then
            sines. Positions outside it take its first or last row. None: nothing turns.
        interleaved: Pairs are neighbouring dimensions (GPT-J), not rotary_dim / 2 apart.
        q_norm: [head_dim] weights of q's RMS norm, q's dtype or fp32. None: no norm.
        k_norm: Weights of k's RMS norm, as q_norm; both or neither.
        eps: Added to the mean of the norm, at least 0.
        positions: [tokens] int32 or int64, instead of those that follow from `kv_lens`, for RoPE
            alone.
        page_indptr: [batch + 1] int32: where each request's pages begin in a flat table.
        cu_q_lens: [batch + 1] int32: where each request's tokens begin and the last end. None: one
            token a request. Tokens behind the last are not written.
        k_scale: What keys of an fp8 cache are divided by: a number above 0, or one fp32 on the
            device. None: 1.
        v_scale: What values are divided by, as k_scale.
        out: [tokens, q_heads, head_dim] to write q's result into; may be q itself, overlaps nothing
            else.
        check: Read lengths, table and positions, and raise for the first row that is wrong. Waits
            for the device; not for captures.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [tokens, q_heads, head_dim] in q's dtype: `out`, if given.

    Raises:
        As `smkern.gemm`.

    Source: RoFormer (arXiv 2104.09864) section 3.4.2; PagedAttention (arXiv 2309.06180) section 4;
        QK norm as in Qwen3 (arXiv 2505.09388) section 2.

    Example:
        >>> import torch, smkern
        >>> from smkern.ops import Rope
        >>> q, k = torch.ones(1, 2, 64).bfloat16(), torch.ones(1, 1, 64).bfloat16()
        >>> cache = torch.zeros(2, 2, 16, 1, 64).bfloat16()
        >>> table, lens = torch.tensor([[1]]).int(), torch.tensor([5]).int()
        >>> out = smkern.qk_norm_rope_append(q, k, k, *cache, table, lens,
        ...                                  cos_sin=Rope(64).table(16))
        >>> cache[1, 1, 4].unique().tolist(), bool((cache[0, 1, 4] == out[0, 0]).all())
        ([1.0], True)
    """
    result: Tensor = _qk_norm_rope_append(
        q, k, v, k_cache, v_cache, page_table, kv_lens, cos_sin, interleaved, q_norm, k_norm, eps,
        positions, page_indptr, cu_q_lens, k_scale, v_scale, out, check, num_sms,
    )  # fmt: skip
    return result


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    page_indptr: Tensor | None = None,
    cu_q_lens: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    check: bool = False,
    num_sms: int | None = None,
) -> None:
    """Write new keys and values into their pages, on at most `num_sms` SMs.

    `smkern.qk_norm_rope_append` without norm, RoPE and q: a cache of k's dtype gets k's bits.

    Args:
        k: [tokens, kv_heads, head_dim], bf16 or fp16 (fp32 on CPU tensors), inner stride 1.
        v: As k.
        k_cache: [pages, page_size, kv_heads, head_dim], any strides with inner stride 1, in k's
            dtype or float8_e4m3fn; written.
        v_cache: As k_cache.
        page_table: [batch, max_pages] int32; or flat [total] with `page_indptr`.
        kv_lens: [batch] int32, keys of each request, the new tokens included.
        page_indptr: [batch + 1] int32: where each request's pages begin in a flat table.
        cu_q_lens: [batch + 1] int32: where each request's tokens begin and the last end. None: one
            token a request.
        k_scale: What keys of an fp8 cache are divided by: a number, or one fp32 on the device.
        v_scale: What values are divided by, as k_scale.
        check: Read the device's memory, and raise for the first row that is wrong.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Raises:
        As `smkern.qk_norm_rope_append`.

    Example:
        >>> import torch, smkern
        >>> k, cache = torch.ones(1, 1, 64), torch.zeros(2, 2, 16, 1, 64)
        >>> smkern.append_kv(k, k, *cache, torch.tensor([[1]]).int(), torch.tensor([5]).int())
        >>> cache.nonzero()[::64, :3].tolist()
        [[0, 1, 4], [1, 1, 4]]
    """
    _append_kv(
        None, k, v, k_cache, v_cache, page_table, kv_lens, None, False, None, None, 1e-6, None,
        page_indptr, cu_q_lens, k_scale, v_scale, None, check, num_sms,
    )  # fmt: skip
