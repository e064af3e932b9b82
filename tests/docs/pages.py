"""The pages of the documentation, and the code that they show."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "bench/results/README.md",
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block: its info string, its text, and the line that the text begins on."""

    info: str
    text: str
    line: int


def snippets(page: Path, language: str) -> list[Snippet]:
    """The page's blocks of a language, with whatever follows it in the info string."""
    text = page.read_text(encoding="utf-8")
    blocks = re.finditer(r"^```(\w+[^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [
        Snippet(match[1], match[2], text.count("\n", 0, match.start(2)) + 1)
        for match in blocks
        if match[1].split()[0] == language
    ]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def run(page: Path, *infos: str) -> tuple[dict[str, Any], str]:
    """Run the page's Python blocks with these info strings, in one namespace.

    Returns:
        The namespace as they left it, and what they printed.
    """
    namespace: dict[str, Any] = {"__name__": "snippet"}
    printed = StringIO()
    with redirect_stdout(printed):
        for snippet in snippets(page, "python"):
            if snippet.info in infos:
                code = "\n" * (snippet.line - 1) + snippet.text
                exec(compile(code, page, "exec"), namespace)
    return namespace, printed.getvalue()
