"""The append kernel under compute-sanitizer's memcheck, which must find a planted fault."""

from __future__ import annotations

import pytest

from tests.gpu.append_sanitizer import sanitized
from tests.gpu.attention.sanitizer import sanitized as planted
from tests.gpu.sanitizer import find_sanitizer, verdict

TIMEOUT_S = 150


@pytest.mark.slow
def test_memcheck_is_clean():
    path = find_sanitizer()
    if path is None:
        pytest.skip("no compute-sanitizer here")
    status, output = planted(path, "memcheck", "planted", TIMEOUT_S)
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device or its virtual machine")
    fine, words = verdict("memcheck", "planted", status, output)
    assert fine, f"{words}\n{output[-3000:]}"
    status, output = sanitized(path, "memcheck", TIMEOUT_S)
    fine, words = verdict("memcheck", "append", status, output)
    assert fine, f"{words}\n{output[-3000:]}"
