"""The example: a trace under every policy, simulated."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from smkern.examples import policies
from smkern.policies import POLICIES
from smkern.replay import Comparison

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Comparison, str, Path]:
    folder = tmp_path_factory.mktemp("demo")
    console = Console(file=StringIO(), width=200)
    result = policies.show(console, folder, None, requests=16)
    assert isinstance(console.file, StringIO)
    return result, console.file.getvalue(), folder


def test_every_policy_serves_all_requests(shown: tuple[Comparison, str, Path]) -> None:
    result, _, _ = shown
    assert set(result.reports) == set(POLICIES)
    for served in result.served.values():
        assert len(served.records) == 16
        assert all(record.is_finished for record in served.records), served.policy


def test_one_table_and_who_won(shown: tuple[Comparison, str, Path]) -> None:
    result, text, _ = shown
    lines = text.splitlines()
    assert all(any(line.startswith(name) for line in lines) for name in POLICIES)
    assert result.verdict() in text


def test_one_picture(shown: tuple[Comparison, str, Path]) -> None:
    _, text, folder = shown
    assert (folder / "policies.png").read_bytes()[1:4] == b"PNG"
    assert "policies.png" in text
