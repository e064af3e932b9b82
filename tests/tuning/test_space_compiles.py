"""What the rules promise about shared memory and registers holds for what the compiler makes."""

import pytest

from smkern.tuning import space
from smkern.tuning.config import GemmConfig, GemmProblem

compiler = pytest.importorskip("smkern.kernels.compile")
variants = pytest.importorskip("smkern.kernels.variants")

CORNERS = {
    "largest tile": GemmConfig("ws", 128, 256, 64, 8, 4),
    "two CTAs an SM": GemmConfig("ws", 64, 192, 64, 4, 3, ctas_per_sm=2),
    "odd columns": GemmConfig("ws", 80, 128, 64, 4, 8, swap=True),
    "three CTAs an SM": GemmConfig("ws", 16, 128, 64, 4, 3, swap=True, ctas_per_sm=3, eager=True),
    "256 rows": GemmConfig("ws", 64, 256, 64, 8, 4, swap=True),
    "tma": GemmConfig("tma", 128, 256, 64, 8, 4),
}


@pytest.mark.parametrize("case", CORNERS)
def test_shared_memory_is_at_most_what_the_rules_say(case):
    config = CORNERS[case]
    assert config in space.variants("bf16", True, (9, 0), (config.kernel,))
    variant = variants.variant_of(GemmProblem(512, 4096, 4096), config, 90)
    artifact = compiler.compile_variant(variant)
    assert artifact.shared_bytes <= space.shared_bytes(config)
