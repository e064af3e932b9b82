"""Merges the (out, lse) states of attention over parts of the keys, in Triton.

With w_i = exp(lse_i - max lse): out = sum w_i out_i / sum w_i and lse = max lse + log(sum w_i), in
the order of the states. A state with lse -inf has seen no keys: its out is not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from smkern.kernels.aot import FamilyKernels, KernelSource, Launch, compile_source
from smkern.kernels.attention.args import MergeProblem
from smkern.kernels.compile import Artifact
from smkern.tuning.config import Budget, Dtype

_POINTERS = ("outs_ptr", "lses_ptr", "out_ptr", "lse_ptr")
_STRIDES = ("outs_state", "outs_token", "outs_head", "out_token", "out_head")
_NUMBERS = ("states", "tokens", "heads", "with_lse")
_FORMAT = f"{len(_POINTERS)}Q{len(_STRIDES)}q{len(_NUMBERS)}q"
_NUM_WARPS = 8
_CTAS_PER_SM = 4
_TILE = 8192
"""Elements of a tile: 32 per thread."""


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


@dataclass(frozen=True, slots=True, order=True)
class MergeVariant:
    """One compiled merge. `aligned`: addresses and strides are multiples of 16 bytes."""

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

    def compile(self) -> Artifact:
        """Compile it (or take it from Triton's cache). Needs no GPU."""
        signature = dict.fromkeys(_POINTERS, "*fp32") | dict.fromkeys(_STRIDES, "i64")
        signature |= dict.fromkeys(("outs_ptr", "out_ptr"), f"*{self.dtype}")
        signature |= dict.fromkeys(_NUMBERS, "i32")
        whole = ("outs_ptr", "out_ptr") if self.aligned else ()
        return compile_source(
            KernelSource(
                merge_states, signature, self.constants, whole, _NUM_WARPS, self.capability
            )
        )


class MergeKernels(FamilyKernels[MergeProblem]):
    """The merge kernels of one device."""

    def variants(self, problem: MergeProblem) -> tuple[MergeVariant, ...]:
        kind = (problem.head_dim, problem.dtype, problem.aligned)
        return (MergeVariant(*kind, self.capability),)

    def prepare(self, problem: MergeProblem, config: None, budget: Budget) -> Launch:
        """The launch of a problem within a budget; loads its kernel if new."""
        (variant,) = self.variants(problem)
        self._load(problem)
        most = budget.most_ctas(_CTAS_PER_SM)
        ctas = max(1, min(most, -(-problem.rows // variant.constants["ROWS"])))
        return self._set.bind(variant, _FORMAT, ctas, overlap=False)
