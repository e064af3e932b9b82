"""The examples of docstrings give what they show."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from tests.docs.pages import ROOT

pytestmark = pytest.mark.slow

ENGINES = ("smkern/integrations/vllm/", "smkern/integrations/sglang/")
"""Imported by engines that are not here."""


def has_examples(path: Path) -> bool:
    """Whether any runs without a GPU, weights and the like."""
    examples = re.findall(r" *>>> .*(?:\n *\.\.\. .*)*", path.read_text())
    return any("+SKIP" not in example for example in examples)


FILES = [
    name
    for path in sorted((ROOT / "smkern").rglob("*.py"))
    if not (name := str(path.relative_to(ROOT))).startswith(ENGINES) and has_examples(path)
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="they show what a machine without a GPU says")
@pytest.mark.parametrize("file", FILES)
def test_examples(file, capsys) -> None:
    module = import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    failed, tried = doctest.testmod(module)
    assert (tried > 0, failed) == (True, 0), capsys.readouterr().out
