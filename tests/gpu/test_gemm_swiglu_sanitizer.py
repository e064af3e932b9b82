"""GEMMs with SwiGLU under compute-sanitizer's memcheck, which must find a planted fault."""

from __future__ import annotations

import pytest

from tests.gpu.sanitizing import sanitized, verdict
from tests.gpu.swiglu_sanitizer import MODULE

TIMEOUT_S = 150


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["ws", "tma", "pointer"])
def test_memcheck_is_clean(sanitizer, kernel):
    status, output = sanitized(sanitizer, "memcheck", MODULE, kernel, TIMEOUT_S)
    fine, words = verdict("memcheck", kernel, status, output)
    assert fine, f"{words}\n{output[-3000:]}"
