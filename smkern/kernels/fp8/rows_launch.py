"""From rows that become e4m3 to their launches: kernels, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.kernels.aot import FamilyKernels, KernelSource, Launch, compile_source
from smkern.kernels.compile import Artifact
from smkern.kernels.driver import OVERLAP_FROM, may_overlap
from smkern.tuning.fp8_rows import Budget, QuantConfig, QuantProblem, choose, num_ctas
from smkern.tuning.rows import VECTOR

_SCALES = {"scale_step": "i64", "block_step": "i64", "rows": "i32"}
PARAMETERS: dict[str, dict[str, str]] = {
    "quantize": {
        "x_ptr": "row", "out_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "x_step": "i64",
        "out_step": "i64", **_SCALES,
    },
    "quantize_tiles": {
        "x_ptr": "row", "out_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "x_step": "i64",
        "out_step": "i64", **_SCALES,
    },
    "quantize_by": {
        "x_ptr": "row", "scale_ptr": "*fp32", "out_ptr": "*fp8e4nv", "x_step": "i64",
        "out_step": "i64", "rows": "i32",
    },
    "largest": {
        "x_ptr": "row", "scale_ptr": "*fp32", "workspace": "*i32", "x_step": "i64", "rows": "i32",
    },
    "silu_and_mul": {
        "x_ptr": "row", "scale_ptr": "*fp32", "out_ptr": "*fp8e4nv", "x_step": "i64",
        "out_step": "i64", **_SCALES,
    },
    "rms_norm": {
        "x_ptr": "row", "weight_ptr": "weight", "scale_ptr": "*fp32", "out_ptr": "*fp8e4nv",
        "x_step": "i64", "out_step": "i64", **_SCALES, "eps": "fp32",
    },
    "add_rms_norm": {
        "x_ptr": "row", "residual_ptr": "row", "weight_ptr": "weight", "scale_ptr": "*fp32",
        "out_ptr": "*fp8e4nv", "x_step": "i64", "residual_step": "i64", "out_step": "i64",
        **_SCALES, "eps": "fp32",
    },
}  # fmt: skip
"""Run-time parameters of each kernel in its order; row strides count `QuantVariant.unit`."""


@dataclass(frozen=True, slots=True, order=True)
class QuantVariant:
    """One compiled kernel."""

    kernel: str
    width: int
    block: int
    blocks: bool
    dtype: str
    weight_dtype: str
    unit: int
    num_warps: int
    capability: int

    def source(self) -> KernelSource:
        """The source to compile."""
        from smkern.kernels.fp8 import rows_triton

        kinds = {"row": f"*{self.dtype}", "weight": f"*{self.weight_dtype}"}
        parameters = PARAMETERS[self.kernel]
        constants: dict[str, Any] = {"H": self.width, "BLOCK": self.block}
        if self.kernel in ("quantize", "silu_and_mul", "rms_norm", "add_rms_norm"):
            constants["BLOCKS"] = self.blocks
        whole = [x for x in parameters if x.endswith("_ptr") and x != "scale_ptr"]
        return KernelSource(
            fn=getattr(rows_triton, f"{self.kernel}_fp8"),
            signature={name: kinds.get(kind, kind) for name, kind in parameters.items()},
            constants=constants | {"UNIT": self.unit, "PDL": self.capability >= OVERLAP_FROM},
            aligned=tuple(whole) if self.unit == VECTOR else (),
            num_warps=self.num_warps,
            capability=self.capability,
        )

    def compile(self) -> Artifact:
        """Compile it (or take it from Triton's cache). Needs no GPU."""
        return compile_source(self.source())


def kernels_of(problem: QuantProblem) -> tuple[str, ...]:
    """The kernels of a problem, in the order of their launches."""
    if problem.op == "quantize" and problem.group == "tensor":
        return ("largest", "quantize_by")
    if problem.group == "weight_block":
        return ("quantize_tiles",)
    return (problem.op,)


class QuantKernels(FamilyKernels[QuantProblem]):
    """The kernels of one device."""

    def variants(self, problem: QuantProblem) -> tuple[QuantVariant, ...]:
        config = choose(problem, Budget(1, "grid"))
        return tuple(
            QuantVariant(
                kernel, problem.width, config.block, problem.group == "block", problem.dtype,
                problem.weight_dtype, VECTOR if problem.aligned else 1, config.num_warps,
                self.capability,
            )
            for kernel in kernels_of(problem)
        )  # fmt: skip

    def prepare(self, problem: QuantProblem, config: QuantConfig, budget: Budget) -> Launch:
        """The launch of a problem within a budget; loads its kernels on first use."""
        ctas = num_ctas(problem, config, budget)
        overlap = may_overlap(config.pdl, budget, self.capability)
        runs = []
        self._load(problem)
        for variant in self.variants(problem):
            words = {"i64": "q", "i32": "q", "fp32": "f4x"}
            kinds = PARAMETERS[variant.kernel].values()
            fmt = "".join(words.get(kind, "Q") for kind in kinds)
            runs.append(self._set.bind(variant, fmt, ctas, overlap=overlap))
        if len(runs) == 1:
            return runs[0]
        largest, quantize_by = runs

        def launch(
            stream: int, x: int, out: int, scale: int, workspace: int, x_step: int, out_step: int,
            scale_step: int, block_step: int, rows: int,
        ) -> None:  # fmt: skip
            largest(stream, x, scale, workspace, x_step, rows)
            quantize_by(stream, x, scale, out, x_step, out_step, rows)

        return launch
