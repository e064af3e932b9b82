"""Decode attention compiled for a device that is absent: lanes of a warp do not part."""

from __future__ import annotations

import pytest

from smkern.kernels.attention.cuda import CudaVariant, compile_cuda_variant
from tests.kernels.cubins import needs_nvcc, told

pytestmark = pytest.mark.slow


@needs_nvcc
@pytest.mark.parametrize(
    ("head_dim", "fp8_cache", "scaled"),
    [(128, True, False), (128, True, True), (128, False, True), (64, True, True)],
)
def test_no_code_brings_lanes_together(head_dim, fp8_cache, scaled, tmp_path):
    """Where the compiler took them to part it checked before each shuffle: 9% of fp8's time."""
    variant = CudaVariant(
        kernel="attention_decode", head_dim=head_dim, fp16=False, fp8_cache=fp8_cache,
        softcap=False, rows8=1, teams=3, tma=False, scaled=scaled, rows4=True,
    )  # fmt: skip
    text = told(compile_cuda_variant(variant, 90), tmp_path, "-sass")
    assert "HMMA" in text
    assert "BRA.DIV" not in text
    assert "WARPSYNC" not in text
