"""The GEMM kernels with SwiGLU compiled for devices that are absent, and the maps they read by."""

from __future__ import annotations

import re
from functools import partial

import pytest

from smkern.kernels import gemm_frame
from smkern.kernels.compile import Artifact
from smkern.kernels.gemm_compile import compile_variant
from smkern.kernels.gemm_launch import GemmPlan
from smkern.kernels.gemm_variants import variant_of
from smkern.tuning import constraints
from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig, GemmProblem
from tests.kernels.cubins import sass, told

pytestmark = pytest.mark.slow

USAGE = re.compile(r"REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
SWIGLU, PLAIN = Epilogue(swiglu=True), Epilogue()
CONFIGS = [
    GemmConfig("ws", 128, 256, 64, 8, 4, split=STREAM_K),
    GemmConfig("ws", 128, 160, 64, 8, 4),
    GemmConfig("ws", 256, 128, 64, 8, 4),
    GemmConfig("ws", 64, 64, 64, 4, 6, ctas_per_sm=2, eager=True),
    GemmConfig("ws", 16, 128, 128, 4, 5, swap=True, eager=True),
    GemmConfig("ws", 80, 64, 64, 4, 4, swap=True, split=3),
    GemmConfig("ws", 64, 256, 64, 8, 4, swap=True),
    GemmConfig("ws", 16, 128, 64, 4, 3, swap=True, ctas_per_sm=3),
    GemmConfig("tma", 128, 256, 64, 8, 3, split=STREAM_K),
    GemmConfig("tma", 64, 128, 64, 4, 4, swap=True),
    GemmConfig("pointer", 128, 128, 64, 8, 3, split=STREAM_K),
]


def compiled(config: GemmConfig, epilogue: Epilogue = SWIGLU) -> Artifact:
    problem = GemmProblem(512, 28672, 4096, epilogue=epilogue)
    return compile_variant(variant_of(problem, config, 90))


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.kernel}-{c.block_m}x{c.block_n}x{c.block_k}"
)
def test_nothing_spills_and_shared_memory_is_at_most_what_the_rules_say(config, tmp_path):
    artifact = compiled(config)
    found = USAGE.search(told(artifact, tmp_path, "-res-usage"))
    assert found
    assert (int(found[1]), int(found[2])) == (0, 0)
    assert artifact.shared_bytes <= constraints.shared_bytes(config)


@pytest.mark.parametrize("config", CONFIGS[:2] + CONFIGS[4:5], ids=lambda c: str(c.block_m))
def test_the_loop_is_the_plain_gemms(config, tmp_path):
    """As many products and copies as without SwiGLU: the rows that they bring are others."""
    fused, plain = sass([compiled(config, x) for x in (SWIGLU, PLAIN)], tmp_path)
    for word in ("HGMMA", "UTMALDG"):
        assert fused.count(word) == plain.count(word) > 0


@pytest.mark.parametrize("swap", [False, True])
def test_the_weights_map_brings_pairs_of_eight_rows(swap, monkeypatch):
    """Of w [2I, K]: [K, 8 rows, gate or up, I / 8], boxes with as many rows as the tile."""
    made = []
    monkeypatch.setattr(gemm_frame, "encode_tensor_map", lambda *given: made.append(given[1:]))
    monkeypatch.setattr(gemm_frame, "replace_address", lambda: None)
    monkeypatch.setattr(gemm_frame, "launcher", lambda *_, overlap: None)
    config = GemmConfig("ws", 64, 128, 64, 4, 4, swap=swap)
    problem = GemmProblem(50, 1040, 72, epilogue=SWIGLU)
    variant = variant_of(problem, config, 90)
    frame_of = partial(gemm_frame.Frame, variant, compile_variant(variant), None)
    GemmPlan(problem, config, Budget(4, "grid"), variant, frame_of).bind(72, 80, 520, 0)
    weights, rows = made
    assert rows == ("bf16", (72, 50), (144,), (64, 64), 3)
    strides = (160, 520 * 160, 8 * 160)
    assert weights == ("bf16", (72, 8, 2, 65), strides, (64, 8, 2, 8), 3)
