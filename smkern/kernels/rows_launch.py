"""From a row operator's problem to its launch: variants, compilation, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.kernels.aot import FamilyKernels, KernelSource, Launch, compile_source
from smkern.kernels.compile import Artifact
from smkern.kernels.driver import OVERLAP_FROM, may_overlap
from smkern.tuning.rows import (
    VECTOR,
    Budget,
    RowsConfig,
    RowsProblem,
    block,
    num_ctas,
    pieces,
    shapes_of,
)

PARAMETERS: dict[str, dict[str, str]] = {
    "rms_norm": {
        "x_ptr": "row", "weight_ptr": "weight", "out_ptr": "row", "x_step": "i64",
        "out_step": "i64", "rows": "i32", "eps": "fp32",
    },
    "add_rms_norm": {
        "x_ptr": "row", "residual_ptr": "row", "weight_ptr": "weight", "out_ptr": "row",
        "x_step": "i64", "residual_step": "i64", "out_step": "i64", "rows": "i32", "eps": "fp32",
    },
    "silu_and_mul": {
        "x_ptr": "row", "out_ptr": "row", "x_step": "i64", "out_step": "i64", "rows": "i32",
    },
    "embedding": {
        "ids_ptr": "index", "table_ptr": "row", "out_ptr": "row", "ids_step": "i64",
        "table_step": "i64", "out_step": "i64", "rows": "i32", "table_rows": "i64",
    },
}  # fmt: skip
"""Run-time parameters of each kernel in its order: addresses, row strides in units of
`RowsVariant.unit` elements (for ids: in ids), numbers."""
_FEW = 16
"""Elements of a row per thread up to which a thread also keeps their weights: loaded together with
the first row, they have arrived when its sum is done."""
_ROOMY = {"num_warps": 16, "held": 32, "maxnreg": 96}
"""The compiler spills for large CTAs with wide rows, although registers are left."""


@dataclass(frozen=True, slots=True, order=True)
class RowsVariant:
    """One compiled kernel: the part of a problem and a configuration that selects code."""

    op: str
    width: int
    dtype: str
    weight_dtype: str
    index_dtype: str
    aligned: bool
    num_warps: int
    vectors: int
    stages: int
    capability: int

    @property
    def is_norm(self) -> bool:
        return self.op in ("rms_norm", "add_rms_norm")

    @property
    def held(self) -> int:
        """Elements of a norm's row per thread."""
        return sum(pieces(self.width, self.num_warps)) * VECTOR // self.num_warps

    @property
    def unit(self) -> int:
        """Unit of row strides, elements."""
        return VECTOR if self.aligned else 1

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time parameters."""
        found: dict[str, Any] = {"H": self.width}
        if self.is_norm:
            found["PIECES"], found["REST"] = pieces(self.width, self.num_warps)
            # a pipelined loop would load the weights through shared memory with every row
            few = self.held <= _FEW
            found |= {"STAGES": self.stages, "EARLY": few or self.stages > 1}
        else:
            found |= {"BLOCK": block(RowsConfig(self.num_warps, self.vectors))}
        return found | {"UNIT": self.unit, "PDL": self.capability >= OVERLAP_FROM}

    def source(self) -> KernelSource:
        """The source to compile."""
        from smkern.kernels import rows_triton

        kinds = {
            "row": f"*{self.dtype}",
            "weight": f"*{self.weight_dtype}",
            "index": f"*{self.index_dtype}",
        }
        parameters = PARAMETERS[self.op]
        whole = [name for name, kind in parameters.items() if kind in ("row", "weight")]
        return KernelSource(
            fn=getattr(rows_triton, f"{self.op}_rows"),
            signature={name: kinds.get(kind, kind) for name, kind in parameters.items()},
            constants=self.constants,
            aligned=tuple(whole) if self.aligned else (),
            num_warps=self.num_warps,
            capability=self.capability,
            maxnreg=_max_registers(self),
        )

    def compile(self) -> Artifact:
        """Compile it (or take it from Triton's cache). Needs no GPU."""
        return compile_source(self.source())


def _max_registers(variant: RowsVariant) -> int | None:
    large = variant.is_norm and variant.num_warps == _ROOMY["num_warps"]
    return _ROOMY["maxnreg"] if large and variant.held >= _ROOMY["held"] else None


def variant_of(problem: RowsProblem, config: RowsConfig, capability: int) -> RowsVariant:
    """The kernel for a problem and a configuration, without what does not affect its code."""
    return RowsVariant(
        problem.op,
        problem.width,
        problem.dtype,
        problem.weight_dtype if problem.is_norm else problem.dtype,
        problem.index_dtype if problem.op == "embedding" else "i32",
        problem.aligned,
        config.num_warps,
        1 if problem.is_norm else config.vectors,
        config.stages,
        capability,
    )


class RowsKernels(FamilyKernels[RowsProblem]):
    """The row kernels of one device."""

    def variants(self, problem: RowsProblem) -> tuple[RowsVariant, ...]:
        return tuple(variant_of(problem, x, self.capability) for x in shapes_of(problem))

    def prepare(self, problem: RowsProblem, config: RowsConfig, budget: Budget) -> Launch:
        """The launch of a problem within a budget; loads all kernels of its kind on first use."""
        variant = variant_of(problem, config, self.capability)
        if not self._set.is_loaded(variant):
            self._load(problem)
        words = {"i64": "q", "i32": "q", "fp32": "f4x"}
        fmt = "".join(words.get(kind, "Q") for kind in PARAMETERS[problem.op].values())
        overlap = may_overlap(config.pdl, budget, self.capability)
        return self._set.bind(variant, fmt, num_ctas(problem, config, budget), overlap=overlap)
