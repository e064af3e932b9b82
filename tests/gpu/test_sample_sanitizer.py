"""The sampler under compute-sanitizer's memcheck and racecheck; a planted fault must be found."""

from __future__ import annotations

import pytest

from tests.gpu.sample_sanitizer import MODULE
from tests.gpu.sample_support import precompile
from tests.gpu.sanitizing import sanitized, verdict

TIMEOUT_S = 300


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_it_is_clean(sanitizer, tool):
    precompile()
    status, output = sanitized(sanitizer, tool, MODULE, "cuda", TIMEOUT_S)
    fine, words = verdict(tool, "cuda", status, output)
    assert fine, f"{words}\n{output[-3000:]}"
