"""What racecheck's reports come to; `make test-gpu` has them made."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from smkern.kernels import gemm_ws
from tests.gpu.every_lane import CHANGES, ROOT, change
from tests.gpu.sanitizer import FOUND, verdict

REPORT = """\
========= Error: Race reported between {} access at gemm_ws+0x100 in gemm_ws.py:{}
=========     and Write access at gemm_ws+0x20b0 in gemm_ws.py:{} [6 hazards]
"""
SUMMARY = "case: right values\n========= RACECHECK SUMMARY: {0} hazards displayed ({1} errors)\n"
TEXT = Path(inspect.getfile(gemm_ws)).read_text().splitlines()
DEFINED = next(i for i, line in enumerate(TEXT, 1) if line.startswith("def gemm_ws("))


def judged(access: str, line: int, *, displayed: int = 1, errors: int = 1) -> bool:
    output = REPORT.format(access, line, DEFINED) + SUMMARY.format(displayed, errors)
    return verdict("racecheck", "gemm-ws", FOUND, output)[0]


def test_only_hand_overs_between_warps_are_known():
    assert judged("Read", DEFINED)
    assert not judged("Write", DEFINED), "what is read lies elsewhere"
    assert not judged("Read", DEFINED + 30), "a statement of the kernel reads it"
    assert not judged("Read", len(TEXT) + 1)
    assert not judged("Read", DEFINED, errors=2), "one was not displayed"
    assert not verdict("memcheck", "gemm-ws", FOUND, "========= Invalid __global__ read")[0]


@pytest.mark.parametrize("name", CHANGES)
def test_every_lane_arrives(name):
    text = (ROOT / name).read_text()
    changed = change(name, text)
    assert changed != text
    with pytest.raises(ValueError, match="mend CHANGES"):
        change(name, changed)
