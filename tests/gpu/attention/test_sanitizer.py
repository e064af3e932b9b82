"""The attention kernels under compute-sanitizer's memcheck, which must find a planted fault."""

from __future__ import annotations

import pytest

from tests.gpu.attention.sanitizer import sanitized
from tests.gpu.attention.support import BACKENDS
from tests.gpu.sanitizer import find_sanitizer, verdict

TIMEOUT_S = 150


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """Path of a compute-sanitizer that sees this GPU and finds what is planted."""
    path = find_sanitizer()
    if path is None:
        pytest.skip("no compute-sanitizer here")
    status, output = sanitized(path, "memcheck", "planted", TIMEOUT_S)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device or its virtual machine")
    fine, words = verdict("memcheck", "planted", status, output)
    assert fine, f"{words}\n{output[-3000:]}"
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kernel", BACKENDS)
def test_memcheck_is_clean(sanitizer, kernel):
    status, output = sanitized(sanitizer, "memcheck", kernel, TIMEOUT_S)
    fine, words = verdict("memcheck", kernel, status, output)
    assert fine, f"{words}\n{output[-3000:]}"
