"""The command line: light, complete, and an error of ours is a message."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

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


def test_unknown_subcommand_exits_2() -> None:
    result = CliRunner().invoke(smkern.cli.cli, ["bench", "nothing"])
    assert result.exit_code == 2
    assert "No such command 'nothing'" in result.output


def test_our_errors_are_messages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command("doctor")
    def failing() -> None:
        raise BudgetError("num_sms is 200; this device has 132; give 2 to 132")

    monkeypatch.setattr("smkern.doctor.command", failing)
    monkeypatch.setattr(sys, "argv", ["smkern", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        smkern.cli.main()
    assert stopped.value.code == 1
    expected = "BudgetError: num_sms is 200; this device has 132; give 2 to 132\n"
    assert capsys.readouterr().err == expected
