"""From routing, permutation and un-permutation to their launches: variants, parameters, grids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from smkern.kernels.aot import FamilyKernels, KernelSource, Launch, compile_source
from smkern.kernels.driver import OVERLAP_FROM, may_overlap
from smkern.tuning.bucket_table import power_of_two
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.moe import (
    COUNTED,
    VECTOR,
    WARPS,
    Budget,
    MoeConfig,
    MoeProblem,
    PermuteProblem,
    TopkProblem,
    UnpermuteProblem,
    block_of,
    group_tokens,
    num_ctas,
    scratch_bytes,
    table_elements,
    ways,
)

if TYPE_CHECKING:
    from smkern.kernels.compile import Artifact

Kernel = Literal[
    "topk_softmax_rows", "permute_few", "count_experts", "permute_many", "unpermute_rows"
]
_SIGNATURES: dict[Kernel, tuple[tuple[str, str], ...]] = {
    "topk_softmax_rows": (
        ("logits_ptr", "*x"), ("weights_ptr", "*fp32"), ("experts_ptr", "*i32"),
        ("logits_stride", "i64"), ("weights_stride", "i64"), ("experts_stride", "i64"),
        ("tokens", "i32"),
    ),
    "permute_few": (
        ("x_ptr", "*i16"), ("experts_ptr", "*i32"), ("rows_ptr", "*i16"), ("offsets_ptr", "*i32"),
        ("index_ptr", "*i32"), ("x_stride", "i64"), ("rows_stride", "i64"), ("tokens", "i32"),
        ("num_experts", "i32"), ("hidden", "i32"),
    ),
    "count_experts": (
        ("experts_ptr", "*i32"), ("counts_ptr", "*i32"), ("total", "i32"), ("num_experts", "i32"),
    ),
    "permute_many": (
        ("x_ptr", "*i16"), ("experts_ptr", "*i32"), ("counts_ptr", "*i32"), ("rows_ptr", "*i16"),
        ("offsets_ptr", "*i32"), ("index_ptr", "*i32"), ("x_stride", "i64"),
        ("rows_stride", "i64"), ("tokens", "i32"), ("share", "i32"), ("num_experts", "i32"),
        ("hidden", "i32"),
    ),
    "unpermute_rows": (
        ("y_ptr", "*x"), ("index_ptr", "*i32"), ("weights_ptr", "*fp32"), ("residual_ptr", "*x"),
        ("out_ptr", "*x"), ("y_stride", "i64"), ("weights_stride", "i64"),
        ("residual_stride", "i64"), ("out_stride", "i64"), ("tokens", "i32"), ("num_rows", "i32"),
        ("hidden", "i32"),
    ),
}  # fmt: skip
"""Run-time parameters in the kernels' order; "*x" points to the activations' dtype."""
_ROWS = ("x_ptr", "rows_ptr", "y_ptr", "residual_ptr", "out_ptr")


@dataclass(frozen=True, slots=True, order=True)
class MoeVariant:
    """One compiled kernel."""

    kernel: Kernel
    dtype: str
    constants: tuple[tuple[str, Any], ...]
    aligned: bool
    num_warps: int
    capability: int

    @property
    def format(self) -> str:
        """The run-time parameters' `struct` format."""
        kinds = (kind for _, kind in _SIGNATURES[self.kernel])
        return "".join("Q" if kind.startswith("*") else "q" for kind in kinds)

    def source(self) -> KernelSource:
        """The source to compile."""
        from smkern.kernels import moe_permute_triton, moe_triton

        given = _SIGNATURES[self.kernel]
        names = {name: f"*{self.dtype}" if kind == "*x" else kind for name, kind in given}
        room = moe_triton if hasattr(moe_triton, self.kernel) else moe_permute_triton
        return KernelSource(
            fn=getattr(room, self.kernel),
            signature=names,
            constants=dict(self.constants) | {"PDL": self.capability >= OVERLAP_FROM},
            aligned=tuple(x for x in _ROWS if x in names) if self.aligned else (),
            num_warps=self.num_warps,
            capability=self.capability,
        )

    def compile(self) -> Artifact:
        """Compile it into the user's cache (or take it from there). Needs no GPU."""
        return compile_source(self.source())


def topk_constants(problem: TopkProblem, config: MoeConfig) -> dict[str, Any]:
    """Compile-time parameters of the routing kernel."""
    return {
        "EXPERTS": problem.num_experts,
        "PAD": power_of_two(problem.num_experts),
        "K": problem.top_k,
        "K_PAD": power_of_two(problem.top_k),
        "ROWS": group_tokens(problem, config),
        "RENORMALIZE": problem.renormalize,
    }


def copied_columns(problem: PermuteProblem, config: MoeConfig) -> int:
    """Columns that a permutation copies at a time: half of what it compares."""
    elements = table_elements(config) // (2 * group_tokens(problem, config))
    return max(16, block_of(problem.hidden, elements))


def few_constants(problem: PermuteProblem, config: MoeConfig) -> dict[str, Any]:
    """Compile-time parameters of the permutation that compares choices."""
    tokens, k = group_tokens(problem, config), power_of_two(problem.top_k)
    return {
        "TOKENS": tokens,
        "K": problem.top_k,
        "K_PAD": k,
        "CHUNK": min(1024, table_elements(config) // (tokens * k)),
        "OFFSETS": VECTOR,
        "BLOCK": copied_columns(problem, config),
        "UNIT": VECTOR if problem.aligned else 1,
    }


def count_constants(problem: PermuteProblem) -> dict[str, Any]:
    """Compile-time parameters of the kernel that counts a block's experts."""
    return {"PAD": power_of_two(problem.num_experts), "COUNTED": COUNTED}


def many_constants(problem: PermuteProblem, config: MoeConfig) -> dict[str, Any]:
    """Compile-time parameters of the permutation that uses counts."""
    tokens, pad = group_tokens(problem, config), power_of_two(problem.num_experts)
    elements = table_elements(config)
    return count_constants(problem) | {
        "COUNTS": max(1, min(16, elements // pad)),
        "HEAD": max(1, min(64, elements // pad)),
        "TOKENS": tokens,
        "K": problem.top_k,
        "K_PAD": power_of_two(problem.top_k),
        "BLOCK": copied_columns(problem, config),
        "UNIT": VECTOR if problem.aligned else 1,
    }


def unpermute_constants(problem: UnpermuteProblem, config: MoeConfig) -> dict[str, Any]:
    """Compile-time parameters of the weighted sum."""
    return {
        "K": problem.top_k,
        "TOKENS": group_tokens(problem, config),
        "BLOCK": block_of(problem.hidden),
        "UNIT": VECTOR if problem.aligned else 1,
        "RESIDUAL": problem.residual,
    }


def variants_of(problem: MoeProblem, config: MoeConfig, capability: int) -> tuple[MoeVariant, ...]:
    """The kernels for a problem and a configuration, in launch order."""

    def made(kernel: Kernel, dtype: str, constants: dict[str, Any], aligned: bool) -> MoeVariant:
        given = tuple(constants.items())
        return MoeVariant(kernel, dtype, given, aligned, config.num_warps, capability)

    if isinstance(problem, TopkProblem):
        # with vector loads, the logits' alignment would decide which lane gets which
        return (made("topk_softmax_rows", problem.dtype, topk_constants(problem, config), False),)
    if isinstance(problem, UnpermuteProblem):
        constants = unpermute_constants(problem, config)
        return (made("unpermute_rows", problem.dtype, constants, problem.aligned),)
    if not config.counted:
        return (made("permute_few", "i16", few_constants(problem, config), problem.aligned),)
    count = made("count_experts", "i16", count_constants(problem), False)
    many = made("permute_many", "i16", many_constants(problem, config), problem.aligned)
    return count, many


def share_of(problem: PermuteProblem, config: MoeConfig, ctas: int) -> int:
    """Tokens per CTA in a counted permutation."""
    tokens = group_tokens(problem, config)
    groups = -(-problem.tokens // tokens)
    return -(-groups // ctas) * tokens


class MoeKernels(FamilyKernels[MoeProblem]):
    """Kernels for routing and the permutations on one device."""

    def variants(self, problem: MoeProblem) -> tuple[MoeVariant, ...]:
        both = (False, True) if isinstance(problem, PermuteProblem) else (False,)
        configs = [MoeConfig(warps, counted=counted) for warps in WARPS for counted in both]
        found = (x for config in configs for x in variants_of(problem, config, self.capability))
        return tuple(dict.fromkeys(found))

    def prepare(self, problem: MoeProblem, config: MoeConfig, budget: Budget) -> Launch:
        """The launch of a problem; loads all kernels of its kind that are new."""
        self._load(problem)
        ctas = num_ctas(problem, config, budget)
        overlap = may_overlap(config.pdl, budget, self.capability)
        bound = [
            self._set.load(variant, variant.compile).bind(variant.format, ctas, overlap=overlap)
            for variant in variants_of(problem, config, self.capability)
        ]
        if isinstance(problem, PermuteProblem):
            return _permutation(problem, config, ctas, bound)
        return _sum(problem, bound[0]) if isinstance(problem, UnpermuteProblem) else bound[0]


def unit_of(problem: PermuteProblem | UnpermuteProblem) -> int:
    """Unit of a kernel's strides and widths, elements."""
    return VECTOR if problem.aligned else 1


def _sum(problem: UnpermuteProblem, run: Launch) -> Launch:
    """launch(stream, y, index, weights, residual, out, 3 row strides, weights' stride, rows)."""
    tokens, unit, hidden = problem.tokens, unit_of(problem), problem.hidden

    def launch(
        stream: int, y: int, index: int, weights: int, residual: int, out: int, y_stride: int,
        residual_stride: int, out_stride: int, weights_stride: int, num_rows: int,
    ) -> None:  # fmt: skip
        run(
            stream, y, index, weights, residual, out, y_stride // unit, weights_stride,
            residual_stride // unit, out_stride // unit, tokens, num_rows, hidden // unit,
        )  # fmt: skip

    return launch


def _permutation(
    problem: PermuteProblem, config: MoeConfig, ctas: int, bound: list[Launch]
) -> Launch:
    """launch(stream, x, experts, rows, offsets, index, [scratch,] x_stride, rows_stride)."""
    tokens, experts, choices = problem.tokens, problem.num_experts, problem.choices
    unit = unit_of(problem)
    hidden = problem.hidden // unit
    if not config.counted:
        few = bound[0]

        def compare(stream: int, *given: int) -> None:
            x_stride, rows_stride = given[-2:]
            few(stream, *given[:5], x_stride // unit, rows_stride // unit, tokens, experts, hidden)

        return compare
    count, many = bound
    share = share_of(problem, config, ctas)

    def counted(
        stream: int, x: int, chosen: int, rows: int, offsets: int, index: int, scratch: int,
        x_stride: int, rows_stride: int,
    ) -> None:  # fmt: skip
        counts = scratch + COUNTER_BYTES
        count(stream, chosen, counts, choices, experts)
        many(
            stream, x, chosen, counts, rows, offsets, index, x_stride // unit,
            rows_stride // unit, tokens, share, experts, hidden,
        )  # fmt: skip

    return counted


def workspace_bytes(problem: MoeProblem) -> int:
    """Size of a launch's workspace, bytes: counters that it does not touch, then counts."""
    needed = scratch_bytes(problem) if any(ways(problem)) else 0
    return COUNTER_BYTES + needed if needed else 0
