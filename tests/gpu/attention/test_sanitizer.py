"""The attention kernels under compute-sanitizer's memcheck, which must find a planted fault."""

from __future__ import annotations

import pytest

from tests.gpu.attention.sanitizer import MODULE
from tests.gpu.attention.support import BACKENDS
from tests.gpu.sanitizing import sanitized, verdict

TIMEOUT_S = 150


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BACKENDS)
def test_memcheck_is_clean(sanitizer, kernel):
    status, output = sanitized(sanitizer, "memcheck", MODULE, kernel, TIMEOUT_S)
    fine, words = verdict("memcheck", kernel, status, output)
    assert fine, f"{words}\n{output[-3000:]}"
