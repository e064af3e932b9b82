"""The command line: light, complete, and an error of ours is a message."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import smkern.cli
from smkern.errors import BudgetError

MODULES = {**smkern.cli.COMMANDS, **smkern.cli.SUITES}


@pytest.mark.parametrize("name", MODULES)
def test_each_subcommand_is_a_click_command_with_help(name: str) -> None:
    command = import_module(MODULES[name][0]).command
    assert isinstance(command, click.Command)
    assert command.help


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"]])
def test_help_names_every_subcommand_and_loads_none(arguments: list[str]) -> None:
    code = (
        "import sys, click.testing, smkern.cli\n"
        f"result = click.testing.CliRunner().invoke(smkern.cli.cli, {arguments})\n"
        "print(result.output, {'torch', 'triton', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.rstrip().endswith("set()")
    group = smkern.cli.SUITES if "bench" in arguments else smkern.cli.COMMANDS
    assert all(f"  {name} " in done.stdout for name in group)


def test_version() -> None:
    result = CliRunner().invoke(smkern.cli.cli, ["--version"])
    assert result.output == f"smkern, version {smkern.__version__}\n"


def written_by(name: str) -> list[str]:
    """The options of a subcommand that name what it writes."""
    command = import_module(MODULES[name][0]).command
    options = {option for one in command.params for option in one.opts}
    return sorted(smkern.cli.WRITTEN & options)


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in MODULES for option in written_by(name)]
)
def test_what_cannot_be_written_is_refused_before_the_work(name, option, tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    group = ["bench"] if name in smkern.cli.SUITES else []
    path = tmp_path / "file" / "below"
    result = CliRunner().invoke(smkern.cli.cli, [*group, name, option, str(path)])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f"'{option}'" in said
    assert "cannot be written (Not a directory): give a path in a folder of your own" in said
    assert (tmp_path / "file").read_text() == "mine"


def writes_a_file(name: str, option: str) -> bool:
    command = import_module(MODULES[name][0]).command
    (found,) = [one for one in command.params if option in one.opts]
    return not found.type.dir_okay or name == "autotune"


@pytest.mark.parametrize("words", [".", "", "folder", "folder/"])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name in MODULES
        for option in written_by(name)
        if writes_a_file(name, option)
    ],
)
def test_a_folder_where_a_file_belongs_is_refused_before_the_work(
    name, option, words, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "there").write_text("mine")
    needed = ["there"] * (name in ("timeline", "merge"))
    group = ["bench"] if name in smkern.cli.SUITES else []
    result = CliRunner().invoke(smkern.cli.cli, [*group, name, *needed, option, words])
    assert result.exit_code == 2
    assert re.search("is a (directory|folder)", " ".join(result.output.split()))
    assert [*(tmp_path / "folder").iterdir()] == []


def test_a_file_where_the_tables_of_a_model_belong_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    words = ["autotune", "--model", "qwen3-8b", "--out", str(tmp_path / "there")]
    result = CliRunner().invoke(smkern.cli.cli, words)
    assert result.exit_code == 2
    assert "is a file: with --model give a folder" in " ".join(result.output.split())


def test_what_can_be_written_is_left_alone_until_it_is(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("mine")
    for path in (None, there, tmp_path, tmp_path / "new" / "folder" / "new.json"):
        option = click.Option(["--out"])
        assert smkern.cli.writable(click.Context(click.Command("x")), option, path) == path
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]
    assert there.read_text() == "mine"


def test_unknown_subcommand_exits_2() -> None:
    result = CliRunner().invoke(smkern.cli.cli, ["bench", "nothing"])
    assert result.exit_code == 2
    assert "no command 'nothing': there is gemm, cutlass" in result.output


@pytest.mark.parametrize(
    "error",
    [
        BudgetError("num_sms is 200; this device has 132; give 2 to 132"),
        OSError(28, "No space left on device", "x.json"),
    ],
)
def test_our_errors_and_the_disks_are_messages(error, monkeypatch, capsys) -> None:
    @click.command("doctor")
    def failing() -> None:
        raise error

    monkeypatch.setattr("smkern.doctor.command", failing)
    monkeypatch.setattr(sys, "argv", ["smkern", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        smkern.cli.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"
