"""What results say of where they come from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from smkern.measure import provenance


def committed(folder: Path) -> str:
    """A repository of one commit; the commit."""
    folder.mkdir(parents=True, exist_ok=True)
    for words in (
        ["init", "-q"],
        ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "c", "--allow-empty"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    told = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return told.stdout[:12]


def test_a_checkouts_commit_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of a repository which it was installed or copied into."""
    root = tmp_path / "project" / "site-packages"
    monkeypatch.setattr(provenance, "__file__", str(root / "smkern" / "measure" / "provenance.py"))
    monkeypatch.delenv("SMKERN_COMMIT", raising=False)
    committed(tmp_path / "project")
    root.mkdir()
    assert provenance.collect_meta()["smkern_commit"] == "unknown"
    monkeypatch.setenv("SMKERN_COMMIT", "abc")
    assert provenance.collect_meta()["smkern_commit"] == "abc"
    own = committed(root)
    assert provenance.collect_meta()["smkern_commit"] == own
