"""What the rules promise about shared memory and registers holds for what the compiler makes."""

import pytest

from smkern.kernels.gemm_compile import compile_variant
from smkern.kernels.gemm_variants import variant_of
from smkern.tuning import candidates, constraints
from smkern.tuning.config import Epilogue, GemmProblem

CORNERS = {
    "largest tile": ("ws", 128, 256, 1, False),
    "odd columns": ("ws", 128, 160, 1, False),
    "two CTAs an SM": ("ws", 64, 192, 2, False),
    "swapped": ("ws", 80, 128, 1, True),
    "three CTAs an SM": ("ws", 16, 128, 3, True),
    "256 rows": ("ws", 64, 256, 1, True),
    "tma": ("tma", 128, 256, 1, False),
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("case", CORNERS)
def test_shared_memory_is_at_most_what_the_rules_say(case, residual):
    """A variant of that kernel, tile and residency; it must also compile within its registers."""
    kernel, block_m, block_n, ctas, swap = CORNERS[case]
    config = next(
        config
        for config in candidates.variants("bf16", True, (9, 0), (kernel,), residual)
        if (config.block_m, config.block_n, config.swap) == (block_m, block_n, swap)
        and config.ctas_per_sm == ctas
    )
    problem = GemmProblem(512, 4096, 4096, epilogue=Epilogue(residual=residual))
    artifact = compile_variant(variant_of(problem, config, 90))
    assert artifact.shared_bytes <= constraints.shared_bytes(config, residual=residual)
