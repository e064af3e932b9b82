"""The documentation is true: snippets run, links lead somewhere, names and paths exist."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import smkern
from smkern import cli
from smkern.bench.replay.command import command as replay_command
from tests.docs.pages import PAGES, ROOT, name_of, prose, run, snippets

INFOS = ("python", "python gpu", "python checkpoint")
"""Runs anywhere; needs a GPU; needs the weights of a model."""
README_LINES = 200
FOLDERS = ("smkern", "autotune", "bench", "csrc", "docs", "examples", "tests", ".ci")

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@cache
def run_once(page: Path) -> tuple[dict[str, Any], str]:
    return run(page, "python")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page, "python")], ids=name_of)
def test_snippets_run(page):
    run_once(page)


def test_the_simulated_runtime_serves_all_tokens():
    found, _ = run_once(ROOT / "docs/policies.md")
    stats = found["mux"].stats()
    assert found["tokens"] == 2000
    assert 1e3 < stats.tbt_us.p99 < 1e5
    assert 0 <= stats.bubble_ratio < 0.5


def test_the_readme_shows_both_policies():
    lines = run_once(ROOT / "README.md")[1].splitlines()
    assert "chosen by" in lines[0]
    assert [line.split()[0] for line in lines[3:5]] == ["chunked", "adaptive"]
    assert " wins: " in lines[5]


@pytest.mark.slow
def test_the_readmes_first_replay_shows_what_it_says(tmp_path):
    lines = (ROOT / "README.md").read_text().splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("smkern replay "))
    assert "the median first token comes in 0.23 to 0.62 of the time (five seeds)" in lines[at - 1]
    out = tmp_path / "replay.json"
    words = [*shlex.split(lines[at])[2:], "--out", str(out)]
    words += [x for seed in range(5) for x in ("--seed", str(seed))]
    assert CliRunner().invoke(replay_command, words).exit_code == 0
    chunks, ours = (
        [x for x in json.loads(out.read_text())["cells"] if x["provider"] == name]
        for name in ("chunked:margin=0.08", "adaptive")
    )
    assert len(chunks) == len(ours) == 5
    for one, other in zip(chunks, ours, strict=True):
        assert one["case"]["seed"] == other["case"]["seed"]
        assert 0.225 <= other["ttft_ms"]["p50"] / one["ttft_ms"]["p50"] < 0.625
        assert other["is_met"]


@every_page
def test_blocks_say_what_they_need_and_compile(page):
    for snippet in snippets(page, "python"):
        assert snippet.info in INFOS, f"{page}:{snippet.line}"
        compile(snippet.text, f"{page}:{snippet.line}", "exec")


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(found), target


def quoted(page: Path) -> Iterator[str]:
    """What the page's prose has in backticks."""
    return (match[1] for match in re.finditer(r"`([^`\n]+)`", prose(page)))


@every_page
def test_paths_exist(page):
    files = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    for text in quoted(page):
        path = text.split()[0].rstrip(":")
        if re.fullmatch(r"\w+\.py", path):
            assert path in files, text
        elif re.fullmatch(r"[\w./-]+/[\w./-]*", path) and (
            path.split("/")[0] in FOLDERS or path.endswith(".py")
        ):
            assert (ROOT / path).exists() or (ROOT / "smkern" / path).exists(), text


def names(page: Path) -> Iterator[str]:
    """Dotted names below `smkern` that the page's prose quotes or its Python uses."""
    for text in quoted(page):
        yield from re.findall(r"(?<![\w./-])smkern(?:\.[A-Za-z_]\w*)+(?![\w/])", text)
    for snippet in snippets(page, "python"):
        for node in ast.walk(ast.parse(snippet.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("smkern"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (a.name for a in node.names if a.name.startswith("smkern"))
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("smkern."):
                yield ast.unparse(node)


def resolve(name: str) -> object:
    """The object of a dotted name; a module is imported on the way."""
    found: object = smkern
    path = "smkern"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part) and find_spec(path) is not None:
            found = import_module(path)
        else:
            found = getattr(found, part)
    return found


@every_page
def test_names_exist(page):
    for name in names(page):
        if not name.startswith("smkern.integrations") or find_spec("transformers"):
            resolve(re.split(r"[^\w.]", name)[0])


def signatures(page: Path) -> Iterator[tuple[str, str]]:
    """Names and arguments of public functions: those of `text` blocks, and quoted with a `*`."""
    blocks = "".join(block.text for block in snippets(page, "text"))
    yield from re.findall(r"^smkern\.(\w+)\((.*?)\)$", blocks, re.DOTALL | re.MULTILINE)
    for text in quoted(page):
        if match := re.fullmatch(r"(?:smkern\.)?(\w+)\((.*, \*, .*)\)", text):
            yield match[1], match[2].replace(", ...", "")


@every_page
def test_signatures_are_those_of_the_operators(page):
    for name, shown in signatures(page):
        known = inspect.signature(resolve(f"smkern.{name}")).parameters
        arguments = ast.parse(f"def _({shown}): ...").body[0].args
        names = [argument.arg for argument in arguments.args]
        assert names == [x.name for x in known.values() if x.kind is x.POSITIONAL_OR_KEYWORD], name
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            assert known[argument.arg].kind is inspect.Parameter.KEYWORD_ONLY, name
            if default is not None:
                assert ast.literal_eval(default) == known[argument.arg].default, (
                    name,
                    argument.arg,
                )


def commands(page: Path) -> Iterator[list[str]]:
    """The `smkern` commands of a page, without their comments."""
    lines = [line for block in snippets(page, "sh") for line in block.text.splitlines()]
    for line in (*lines, *quoted(page)):
        words = shlex.split(line, comments=True) if line.startswith("smkern ") else []
        if words and "..." not in words:
            yield words[1:]


@pytest.mark.slow
@every_page
def test_commands_parse(page):
    for words in commands(page):
        command, context = cli.cli, click.Context(cli.cli)
        while isinstance(command, click.Group):
            name, *words = words
            found = command.get_command(context, name)
            assert found is not None, name
            command, context = found, click.Context(found, parent=context, info_name=name)
            if not words:
                break
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, words


@every_page
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for block in snippets(page, "sh") for line in block.text.splitlines()]
    for line in (*lines, *quoted(page)):
        if match := re.match(r"make ([a-z-]+)", line):
            assert match[1] in targets, line


@every_page
def test_extras_exist(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = page.read_text()
    for extra in re.findall(r"pip install [^\n`]*\[(\w+)\]", text):
        assert extra in project["optional-dependencies"], extra
