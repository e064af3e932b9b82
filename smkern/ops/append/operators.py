"""The append of new keys and values with an SM budget: the public operators."""

from __future__ import annotations

from types import NoneType

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.errors import ArgumentError
from smkern.ops.append import library
from smkern.ops.append.call import Call
from smkern.ops.append.eager import append_cpu, eager_append

_PLAIN = frozenset({Tensor, Parameter, NoneType})
_NEEDED = ("k", "v", "k_cache", "v_cache", "page_table", "kv_lens")
_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


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
        v: Likewise.
        k_cache: [pages, page_size, kv_heads, head_dim], any strides with inner stride 1, in q's
            dtype or float8_e4m3fn; written. page_size 1, 16, 32, 64, 128 or 256.
        v_cache: Likewise.
        page_table: [batch, max_pages] int32, rows may be apart; or flat [total] with `page_indptr`.
            Requests must not share a page that is written.
        kv_lens: [batch] int32, keys of each request, the new tokens included.
        cos_sin: [max_position, rotary_dim] fp32 or q's dtype, from `Rope.table`: cosines, then
            sines. Positions outside it take its first or last row. None: nothing turns.
        interleaved: Pairs are neighbouring dimensions (GPT-J), not rotary_dim / 2 apart.
        q_norm: [head_dim] weights of q's RMS norm, q's dtype or fp32. None: no norm.
        k_norm: Likewise of k's; both or neither.
        eps: Of the norm.
        positions: [tokens] int32 or int64, instead of those that follow from `kv_lens`, for RoPE
            alone.
        page_indptr: [batch + 1] int32: where each request's pages begin in a flat table.
        cu_q_lens: [batch + 1] int32: where each request's tokens begin and the last end. None: one
            token a request. Tokens behind the last are not written.
        k_scale: What keys of an fp8 cache are divided by: a number above 0, or one fp32 on the
            device. None: 1.
        v_scale: Likewise for values.
        out: [tokens, q_heads, head_dim] to write q's result into; may be q itself, overlaps nothing
            else.
        check: Read lengths, table and positions, and raise for the first row that is wrong. Waits
            for the device; not for captures.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [tokens, q_heads, head_dim] in q's dtype: `out`, if given.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition.
        ArgumentError: what cannot be served; overlaps.
        DeviceError: the GPU is older than sm_80.
        PartitionError: the current stream's partition is closed.
        WarmupError: a graph capture met a kernel that is not loaded.

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
    call = Call(
        q, k, v, k_cache, v_cache, page_table, kv_lens, cos_sin, interleaved, q_norm, k_norm, eps,
        positions, page_indptr, cu_q_lens, k_scale, v_scale, out, check, num_sms,
    )  # fmt: skip
    if q is None:
        raise ArgumentError("q is None: pass a tensor, or use smkern.append_kv")
    result = _dispatch(call)
    assert result is not None
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
        v: Likewise.
        k_cache: [pages, page_size, kv_heads, head_dim], any strides with inner stride 1, in k's
            dtype or float8_e4m3fn; written.
        v_cache: Likewise.
        page_table: [batch, max_pages] int32; or flat [total] with `page_indptr`.
        kv_lens: [batch] int32, keys of each request, the new tokens included.
        page_indptr: [batch + 1] int32: where each request's pages begin in a flat table.
        cu_q_lens: [batch + 1] int32: where each request's tokens begin and the last end. None: one
            token a request.
        k_scale: What keys of an fp8 cache are divided by: a number, or one fp32 on the device.
        v_scale: Likewise for values.
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
    _dispatch(
        Call(
            None,
            k,
            v,
            k_cache,
            v_cache,
            page_table,
            kv_lens,
            page_indptr=page_indptr,
            cu_q_lens=cu_q_lens,
            k_scale=k_scale,
            v_scale=v_scale,
            check=check,
            num_sms=num_sms,
        )
    )


def _dispatch(call: Call) -> Tensor | None:
    """Directly where plain tensors meet no mode, else by torch's dispatcher."""
    q, k, v, k_cache, v_cache, page_table, kv_lens = call[:7]
    if (
        _is_compiling()
        or q.__class__ not in _PLAIN
        or k.__class__ not in _PLAIN
        or v.__class__ not in _PLAIN
        or k_cache.__class__ not in _PLAIN
        or v_cache.__class__ not in _PLAIN
        or page_table.__class__ not in _PLAIN
        or kv_lens.__class__ not in _PLAIN
        or call.out.__class__ not in _PLAIN
        or _num_modes()
        or _transform() is not None
    ):
        return library.through_library(call)
    for name in _NEEDED:
        if getattr(call, name) is None:
            raise ArgumentError(f"{name} is None: pass a tensor")
    if k_cache.is_cuda:
        return eager_append(k_cache.get_device())(call)
    if k_cache.device.type == "cpu":
        return append_cpu(call)
    return library.through_library(call)
