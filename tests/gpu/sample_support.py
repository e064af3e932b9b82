"""What the sampler's tests on a GPU share: its kernels compiled ahead, side by side."""

from __future__ import annotations

from smkern.kernels.sample import variants_of
from smkern.tuning.sample import SampleProblem
from tests.gpu.compiling import compile_ahead
from tests.gpu.gemm_support import capability


def precompile() -> None:
    """Every kernel into this user's cache."""
    compile_ahead(
        variant
        for dtype in ("bf16", "fp16", "fp32")
        for aligned in (True, False)
        for variant in variants_of(SampleProblem(1, 64, dtype, aligned), capability())
    )
