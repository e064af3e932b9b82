"""JSON documents that somebody spoiled: values of another kind, numbers too large, texts cut."""

from __future__ import annotations

import json
from random import Random
from typing import Any

VALUES = (
    "null", "true", "-1", "0", "1", "0.5", "-0.0", "1e-320", "1e300", "1e999", "NaN", "-Infinity",
    "7" * 5000, "7" * 400, str(2**70), str(2**63 - 1), str(2**31), '""', '"5"', '"nan"',
    '"\\ud800"', "[]", "[[]]", "[null]", "{}", '{"": 1}', "[" * 100_000 + "]" * 100_000,
)  # fmt: skip
"""What is written where something else belongs."""


def spoiled(random: Random, document: Any) -> str:
    """The text of a document after one to three changes; now and then what is left of it."""
    document = json.loads(json.dumps(document))
    written: dict[str, str] = {}
    for number in range(random.choice((1, 1, 1, 2, 3))):
        _change(random, document, f"@{number}@", written)
    text = json.dumps(document)
    for mark, value in written.items():
        text = text.replace(json.dumps(mark), value)
    return _torn(random, text) if random.random() < 0.1 else text


def _change(random: Random, document: Any, mark: str, written: dict[str, str]) -> None:
    """Put a mark that becomes a hostile value somewhere; or take away, or double, what is there."""
    node = document
    while True:
        places = list(node) if isinstance(node, dict) else range(len(node))
        if not places:
            return
        place = random.choice(list(places))
        inner = node[place]
        if isinstance(inner, (dict, list)) and inner and random.random() < 0.8:
            node = inner
            continue
        how = random.random()
        if how < 0.1:
            del node[place]
        elif how < 0.15 and isinstance(node, dict):
            node[f"{place}_too"] = inner
        elif how < 0.15:
            node.append(inner)
        else:
            node[place] = mark
            written[mark] = random.choice(VALUES)
        return


def _torn(random: Random, text: str) -> str:
    """A text that is cut, or has a character in it that was not there."""
    at = random.randrange(len(text) + 1)
    return (
        text[:at] if random.random() < 0.5 else text[:at] + chr(random.randrange(128)) + text[at:]
    )
