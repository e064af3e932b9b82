"""Command lines that somebody mistyped: each ends by its work, a usage error or one of ours."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from matplotlib.figure import Figure

import smkern.cli
from smkern.errors import SmkernError
from smkern.latency import Size
from tests.runtime.timeline.timelines import Script

ROOT = Path(__file__).resolve().parents[2]
VALUES = (
    "", " ", "0", "-1", "1", "0.5", "1e9", "1e300", "nan", "inf", "-inf", "9" * 20, "7" * 5000,
    "None", "a,b", ",", "16,", "1-99999999999", "1-9:0", "9-1", "0x0", "64x0", "8" * 5000 + "x8",
    ".", "/", "..", "/dev/null", "/dev/null/below", "folder", "folder/new", "file.json",
    "missing.json", "trace.json", "n" * 300, "qwen3-8b", "chunked:0", "chunked:-1",
    "chunked:x", "static_split:7", "conversation-like+", "fcfs,", "--", "-x",
)  # fmt: skip
"""What is written where something else belongs; some name what the folder holds."""
LINES = (
    "replay --simulate --rate 8 --seconds 1 --policy chunked --trace conversation-like",
    "replay --simulate --rate 8 --seconds 1 --policy static_split:32 --rungs 32 --out new.json",
    "timeline trace.json --out picture.png --from-ms 0 --to-ms 1",
    "autotune --dry-run --shapes 512x512 --ms 16 --budgets 16,32",
    "autotune --dry-run --model qwen3-8b --budgets 32",
    "autotune --op sample --out new.json --minutes 1",
    "profile --model qwen3-8b --out new.jsonl --gpu-minutes 1 --seed 3",
    "bench merge file.json file.json --out new.json",
    "bench plot --results folder --out pictures",
    "bench gemm --out new.json --quick",
    "bench ceilings --out new.json --quick",
    "bench host --out new.json",
    "bench untuned --out new.json",
    "bench replay-confirm --goodputs file.json --out new.json",
)
"""Right command lines: none takes long without a GPU, or writes outside the folder by default."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a machine without a GPU; pictures are not rendered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Figure, "savefig", lambda *of, **how: None)
    return tmp_path


def fill(folder: Path) -> None:
    (folder / "folder").mkdir(exist_ok=True)
    found = json.loads((ROOT / "bench/results/h200/runtime.json").read_text())
    (folder / "file.json").write_text(json.dumps(found | {"cells": found["cells"][:3]}))
    script = Script()
    script.ran("decode", 10.0, 30.0, size=Size(batch=4, total_kv=64, num_layers=4))
    script.timeline.save(folder / "trace.json")


def options(words: list[str]) -> list[str]:
    command: Any = smkern.cli.cli
    context = click.Context(command)
    for word in words[: 2 if words[0] == "bench" else 1]:
        command = command.get_command(context, word)
    return [one.opts[0] for one in command.params if one.opts[0].startswith("--")]


def mistyped(random: Random, line: str) -> list[str]:
    """The words of a command line after one to three changes."""
    words = line.split()
    first = 2 if words[0] == "bench" else 1
    for _ in range(random.choice((1, 1, 2, 3))):
        how = random.random()
        given = [at for at in range(first, len(words)) if not words[at].startswith("--")]
        if how < 0.5 and given:
            words[random.choice(given)] = random.choice(VALUES)
        elif how < 0.85:
            words += [random.choice(options(line.split())), random.choice(VALUES)]
        elif len(words) > first:
            del words[random.randrange(first, len(words))]
    return words


def invoke(words: list[str]) -> Result:
    return CliRunner().invoke(smkern.cli.cli, words)


@pytest.mark.parametrize("line", LINES)
def test_a_mistyped_line_ends_by_name(cases, folder: Path, line: str) -> None:
    for random in cases(4):
        fill(folder)
        words = mistyped(random, line)
        found = invoke(words)
        assert isinstance(found.exception, (SystemExit, SmkernError, OSError, type(None))), words
