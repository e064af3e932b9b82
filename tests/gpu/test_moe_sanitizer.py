"""The experts' kernels under compute-sanitizer's memcheck, which must find a planted fault."""

from __future__ import annotations

import pytest

from tests.gpu.moe_sanitizer import MODULE
from tests.gpu.sanitizing import sanitized, verdict

TIMEOUT_S = 200


@pytest.mark.slow
def test_memcheck_is_clean(sanitizer):
    status, output = sanitized(sanitizer, "memcheck", MODULE, "triton", TIMEOUT_S)
    fine, words = verdict("memcheck", "triton", status, output)
    assert fine, f"{words}\n{output[-3000:]}"
