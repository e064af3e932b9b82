"""The kernels under compute-sanitizer, which must find a planted fault."""

from __future__ import annotations

from itertools import product

import pytest

from tests.gpu.sample_support import precompile
from tests.gpu.sanitizer import find_sanitizer, sanitized, verdict
from tests.gpu.sanitizer_cases import CASES

pytestmark = pytest.mark.slow


def check(sanitizer: str, tool: str, case: str) -> None:
    status, output = sanitized(sanitizer, tool, case)
    fine, words = verdict(tool, case, status, output)
    assert fine, f"{words}\n{output[-3000:]}"


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """Path of a compute-sanitizer that sees this GPU and finds what is planted."""
    path = find_sanitizer()
    if path is None:
        pytest.skip("no compute-sanitizer here")
    if "Device not supported" in sanitized(path, "memcheck", "planted")[1]:
        pytest.skip("compute-sanitizer does not support this device or its virtual machine")
    check(path, "memcheck", "planted")
    return path


@pytest.mark.parametrize(("tool", "case"), list(product(("memcheck", "racecheck"), CASES)))
def test_it_is_clean(sanitizer, tool, case):
    if case == "sample":
        precompile()
    check(sanitizer, tool, case)
