"""Attention over parts of the keys put together: a merge of (out, lse) states, in Triton.

With w_i = exp(lse_i - max lse): out = sum w_i out_i / sum w_i and lse = max lse + log(sum w_i), in
the order of the states. A state with lse -inf has seen nothing: its out is not read.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from smkern.kernels.compile import Artifact
from smkern.kernels.driver import check, launch_kernel, load_function
from smkern.kernels.ledger import ledger
from smkern.tuning.config import Budget, Dtype

_POINTERS = ("outs_ptr", "lses_ptr", "out_ptr", "lse_ptr")
_STRIDES = ("outs_state", "outs_token", "outs_head", "out_token", "out_head")
_NUMBERS = ("states", "tokens", "heads", "with_lse")
# the two last are Triton's scratch pointers, unused
_PACKED = struct.Struct(f"<{len(_POINTERS)}Q{len(_STRIDES)}q{len(_NUMBERS)}q2Q")
_WORDS = _PACKED.size // 8
_NUM_WARPS = 8
_CTAS_PER_SM = 4
_TILE = 8192
"""Elements of a tile: 32 a thread."""


@triton.jit
def merge_states(
    outs_ptr, lses_ptr, out_ptr, lse_ptr,
    outs_state, outs_token, outs_head, out_token, out_head,
    states, tokens, heads, with_lse,
    ROWS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Merge `states` of [tokens, heads, DIM]; strides count UNIT elements, lses are contiguous."""
    rows = tokens * heads
    dim = tl.arange(0, PAD)
    for block in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        live = row < rows
        token = row // heads
        head = row % heads
        top = tl.full([ROWS], float("-inf"), tl.float32)
        for state in range(states):
            lse = tl.load(lses_ptr + state * rows + row, mask=live, other=float("-inf"))
            top = tl.maximum(top, lse)
        base = tl.where(top == float("-inf"), 0.0, top)
        acc = tl.zeros([ROWS, PAD], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for state in range(states):
            lse = tl.load(lses_ptr + state * rows + row, mask=live, other=float("-inf"))
            seen = live & (lse != float("-inf"))
            at = (state * outs_state + token * outs_token + head * outs_head)[:, None] * UNIT
            part = tl.load(
                outs_ptr + at + dim[None, :], mask=seen[:, None] & (dim < DIM)[None, :], other=0.0
            )
            weight = tl.exp(lse - base)
            total += weight
            acc += weight[:, None] * part.to(tl.float32)
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        value = acc / total[:, None]
        at = (token * out_token + head * out_head)[:, None] * UNIT + dim[None, :]
        tl.store(
            out_ptr + at,
            value.to(out_ptr.dtype.element_ty),
            mask=live[:, None] & (dim < DIM)[None, :],
        )
        merged = tl.where(empty, float("-inf"), base + tl.log(total))
        tl.store(lse_ptr + row, merged, mask=live & (with_lse != 0))


@dataclass(frozen=True, slots=True)
class MergeArguments:
    """Addresses and sizes of a merge; strides in elements, the inner one 1.

    `outs` [n, num_tokens, num_heads, head_dim], `lses` fp32 [n, num_tokens, num_heads] contiguous;
    `out` [num_tokens, num_heads, head_dim], `lse` fp32 contiguous or 0.
    """

    outs: int
    lses: int
    out: int
    lse: int
    outs_strides: tuple[int, int, int]
    out_strides: tuple[int, int]
    num_tokens: int
    num_heads: int


@dataclass(frozen=True, slots=True, order=True)
class MergeVariant:
    """One compiled merge. `aligned`: addresses and strides are whole 16 bytes."""

    head_dim: int
    dtype: Dtype
    aligned: bool
    capability: int

    @property
    def unit(self) -> int:
        return (4 if self.dtype == "fp32" else 8) if self.aligned else 1

    @property
    def constants(self) -> dict[str, int]:
        pad = max(16, 1 << (self.head_dim - 1).bit_length())
        return {"ROWS": _TILE // pad, "DIM": self.head_dim, "PAD": pad, "UNIT": self.unit}


MergeLaunch = Callable[[MergeArguments, int], None]
LoadedMerges = dict[MergeVariant, tuple[Artifact, ctypes.c_void_p]]


def compile_merge(variant: MergeVariant) -> Artifact:
    """Compile a merge (or take it from Triton's cache). Needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(_POINTERS, "*fp32") | dict.fromkeys(_STRIDES, "i64")
    signature |= dict.fromkeys(("outs_ptr", "out_ptr"), f"*{variant.dtype}")
    signature |= dict.fromkeys(_NUMBERS, "i32") | dict.fromkeys(variant.constants, "constexpr")
    attrs: dict[tuple[int], list[list[Any]]] = {}
    if variant.aligned:
        whole = ("outs_ptr", "out_ptr")
        names = merge_states.arg_names
        attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
    kernel = triton.compile(
        ASTSource(merge_states, signature, variant.constants, attrs),
        target=GPUTarget("cuda", variant.capability, 32),
        options={"num_warps": _NUM_WARPS},
    )
    meta = kernel.metadata
    return Artifact(
        name=meta.name, cubin=kernel.asm["cubin"], num_threads=meta.num_warps * 32,
        shared_bytes=meta.shared, swizzles=(), boxes=(), unit=variant.unit,
    )  # fmt: skip


def prepare_merge(
    n: int,
    head_dim: int,
    dtype: Dtype,
    budget: Budget,
    capability: int,
    loaded: LoadedMerges | None = None,
) -> MergeLaunch:
    """The launch that merges `n` states within `budget`; compiles and loads what `loaded` lacks.

    A first call with addresses or strides that are not whole 16 bytes loads once more.
    """
    known: LoadedMerges = {} if loaded is None else loaded
    most = budget.num_sms * (_CTAS_PER_SM if budget.confined == "mask" else 1)
    launches = {
        aligned: MergeVariant(head_dim, dtype, aligned, capability) for aligned in (True, False)
    }
    _load(launches[True], known)
    buffer = ctypes.create_string_buffer(_PACKED.size)
    start = ctypes.addressof(buffer)
    params = (ctypes.c_void_p * _WORDS)(*(start + 8 * i for i in range(_WORDS)))
    lock, run = threading.Lock(), launch_kernel()
    whole, rows = launches[True].unit, launches[True].constants["ROWS"]

    def launch(a: MergeArguments, stream: int) -> None:
        strides = (*a.outs_strides, *a.out_strides)
        aligned = not ((a.outs | a.out) % 16 or any(stride % whole for stride in strides))
        variant = launches[aligned]
        artifact, function = _load(variant, known)
        ctas = max(1, min(most, -(-a.num_tokens * a.num_heads // rows)))
        with lock:
            _PACKED.pack_into(
                buffer, 0, a.outs, a.lses, a.out, a.lse,
                *(stride // variant.unit for stride in strides),
                n, a.num_tokens, a.num_heads, a.lse != 0, 0, 0,
            )  # fmt: skip
            code = run(
                function.value, ctas, 1, 1, artifact.num_threads, 1, 1, artifact.shared_bytes,
                stream, params, None,
            )  # fmt: skip
        if code:
            check(code, f"launching {ctas} CTAs of {variant} on {n} states")

    return launch


def _load(variant: MergeVariant, known: LoadedMerges) -> tuple[Artifact, ctypes.c_void_p]:
    if variant not in known:
        artifact = compile_merge(variant)
        function = load_function(artifact.cubin, artifact.name, artifact.shared_bytes)
        known[variant] = artifact, function
        ledger().append(variant)
    return known[variant]
