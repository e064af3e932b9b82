"""Scales of permuted rows: each token's, once a choice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from smkern.kernels.aot import KernelSet, KernelSource, Launch, compile_source
from smkern.kernels.compile import Artifact
from smkern.kernels.driver import OVERLAP_FROM, may_overlap
from smkern.tuning.fp8_rows import RESIDENT, Budget

SIGNATURE = {
    "scale_ptr": "*fp32", "index_ptr": "*i32", "out_ptr": "*fp32", "out_step": "i64",
    "block_step": "i64", "choices": "i32",
}  # fmt: skip
_ITEM = 512
"""Scales that a CTA moves at a time."""


@dataclass(frozen=True, slots=True, order=True)
class ScatterVariant:
    """One compiled kernel."""

    top_k: int
    groups: int
    capability: int

    @property
    def high(self) -> int:
        """Choices of an item, a power of two."""
        return max(1, _ITEM // self.wide)

    @property
    def wide(self) -> int:
        """Scales of a row, padded to a power of two."""
        return 1 << (self.groups - 1).bit_length()

    def compile(self) -> Artifact:
        """Compile it (or take it from Triton's cache). Needs no GPU."""
        from smkern.kernels.fp8.rows_triton import scatter_scales

        return compile_source(
            KernelSource(
                fn=scatter_scales,
                signature=SIGNATURE,
                constants={
                    "TOP_K": self.top_k,
                    "GROUPS": self.groups,
                    "HIGH": self.high,
                    "WIDE": self.wide,
                    "PDL": self.capability >= OVERLAP_FROM,
                },
                aligned=(),
                num_warps=4,
                capability=self.capability,
            )
        )


@cache
def _kernels() -> KernelSet:
    return KernelSet()


def is_loaded(variant: ScatterVariant) -> bool:
    """Whether `scatter` would compile and load nothing."""
    return _kernels().is_loaded(variant)


def scatter(variant: ScatterVariant, budget: Budget, choices: int) -> Launch:
    """launch(stream, scales, index, out, out_step, block_step, choices); loads it if it is new."""
    loaded = _kernels().load(variant, variant.compile)
    ctas = max(1, min(budget.most_ctas(RESIDENT), -(-choices // variant.high)))
    return loaded.bind("3Q3q", ctas, overlap=may_overlap(True, budget, variant.capability))
