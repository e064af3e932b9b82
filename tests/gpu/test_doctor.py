"""The doctor on a real GPU: every backend tried, nothing that is there broken."""

from __future__ import annotations

from smkern import doctor


def test_nothing_fails_here(device: int) -> None:
    report = doctor.examine(device)
    assert [found for found in report.findings if found.status == "failed"] == []
    assert not report.runs_anyway
