"""`smkern serve` as a process with its engine's: stopped by a signal, or by the engine's end."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import openai
import pytest
import torch
import transformers
from click.testing import CliRunner
from openai import OpenAI

import smkern.server.command
from smkern import cli
from smkern.errors import ArgumentError, ConfigError, EngineDeadError, TableError
from smkern.policies import ORDERS
from tests.models.peers import hf_config
from tests.server import beginning

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context of 4,096 tokens."""
    torch.manual_seed(7)
    config = hf_config("qwen3", max_position_embeddings=4096)
    path = tmp_path_factory.mktemp("served") / "tiny-qwen3"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@contextmanager
def served(folder: Path) -> Iterator[tuple[subprocess.Popen[str], OpenAI]]:
    """`smkern serve` of a folder on the CPU, once it serves."""
    words = ["--model", str(folder), "--device", "cpu", "--port", "0", "--max-running", "4"]
    words += ["--policy", "chunked"]
    process = subprocess.Popen(
        [sys.executable, "-m", "smkern", "serve", *words], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = ""
        while not (found := re.search(r"(http://\S+)\n", said)):
            said += (line := process.stderr.readline())
            assert line, said
        client = OpenAI(base_url=found[1], api_key="none", max_retries=5)
        client.models.list()  # it listens a moment later
        yield process, client
    finally:
        process.kill()
        process.wait()


def stream(client: OpenAI, count: int) -> Any:
    return client.completions.create(
        model="tiny-qwen3", prompt=[1, 2, 3], max_tokens=count, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip


@pytest.mark.parametrize(("device", "said"), [(None, True), ("cpu", False)])
def test_without_a_gpu_it_says_where_the_model_runs(device, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr("smkern.device.has_gpu", lambda: False)
    monkeypatch.setattr("smkern.server.model.open_runtime", lambda options, say: options)
    smkern.server.command._open({"model": "qwen3-8b", "device": device})
    assert ("no GPU: qwen3-8b runs in plain torch" in capsys.readouterr().err) == said


def test_sigterm_lets_streams_end_and_the_process_with_them(folder: Path) -> None:
    with served(folder) as (process, client):
        parts = stream(client, 150)
        next(parts)
        process.send_signal(signal.SIGTERM)
        rest = list(parts)
        assert rest[-1].choices[0].finish_reason == "length"
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_an_engine_that_is_killed_ends_streams_and_the_process(folder: Path) -> None:
    with served(folder) as (process, client):
        parts = stream(client, 3000)
        next(parts)
        os.kill(engine_of(process.pid), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine's process ended without a word"):
            list(parts)
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert "EngineDeadError" in process.stderr.read()


def engine_of(pid: int) -> int:
    """The child of a process that is not multiprocessing's tracker."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (found,) = [
        child for child in children
        if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()
    ]  # fmt: skip
    return int(found)


def refused(*words: str) -> Exception:
    result = CliRunner().invoke(cli.cli, ["serve", *words])
    assert isinstance(result.exception, Exception)
    return result.exception


def test_a_model_that_is_none_is_named(tmp_path: Path) -> None:
    opened = smkern.server.command._open({"model": str(tmp_path), "device": "cpu"})
    with pytest.raises(ConfigError, match=r"config\.json"), opened:
        pass


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (beginning.fails, "ConfigError: qwen3-8b has no config.json"),
        (beginning.dies, "EngineDeadError: the engine's process ended while it loaded"),
    ],
)
def test_an_engine_that_cannot_begin_is_an_error(begin, said, monkeypatch) -> None:
    monkeypatch.setattr(smkern.server.command, "begin_engine", begin)
    error = refused("--model", "qwen3-8b", "--device", "cpu", "--port", "0")
    assert f"{type(error).__name__}: {error}".startswith(said)
    assert multiprocessing.active_children() == []


def test_a_port_that_is_taken_is_said_before_anything_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        error = refused("--model", "qwen3-8b", "--port", str(taken.getsockname()[1]))
    assert isinstance(error, ArgumentError)
    assert "cannot be bound (Address already in use): give another port" in str(error)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--api-key", ""], "the API key is empty"),
        (["--model", "nobody"], "model 'nobody' is neither a folder nor a preset"),
        (["--policy", "foo"], "policy 'foo': there is adaptive, "),
        (["--policy", "chunked:abc"], "chunk_tokens='abc': give a whole number"),
        (["--policy", "adaptive:foo=1"], "policy 'adaptive:foo=1' has no foo"),
        (["--policy", "adaptive:late=2"], "late=2"),
        (["--table", __file__], "test_command.py is not valid JSON"),
        (["--max-context", "100000"], "--max-context=100000: give a whole number of at least 1"),
        (["--host", "no.such.host.invalid"], "cannot be bound"),
        (["--host", "no.such.host.invalid"], "give an address of this machine, 127.0.0.1 or"),
        (["--host", "192.0.2.1"], "give an address of this machine, 127.0.0.1 or"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_loads(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smkern.server.command, "engine_process", None)
    error = refused("--model", "qwen3-8b", "--port", "0", *words)
    assert isinstance(error, ArgumentError | ConfigError | TableError)
    assert said in str(error)


def test_the_engine_is_told_where_a_tokenizer_ends_texts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {text: index for index, text in enumerate(["<|endoftext|>", "a", "b", "<|im_end|>"])}
    made = transformers.Qwen2Tokenizer(vocab=words, merges=[], eos_token="<|im_end|>")
    made.save_pretrained(tmp_path)
    asked: list[dict[str, Any]] = []

    @contextmanager
    def engine_process(options: dict[str, Any]) -> Iterator[None]:
        asked.append(options)
        raise EngineDeadError("as far as that")
        yield

    monkeypatch.setattr(smkern.server.command, "engine_process", engine_process)
    refused("--model", str(folder), "--tokenizer", str(tmp_path), "--port", "0")
    refused("--model", str(folder), "--port", "0")
    assert [x["end_tokens"] for x in asked] == [(3,), ()]


def test_an_order_is_one_of_the_policies() -> None:
    (order,) = [x for x in smkern.server.command.command.params if x.name == "order"]
    assert isinstance(order.type, click.Choice)
    assert [*order.type.choices] == [*ORDERS]
    found = CliRunner().invoke(cli.cli, ["serve", "--model", "qwen3-8b", "--order", "foo"])
    assert found.exit_code == 2
    assert "function" not in found.output


def test_a_limit_is_a_finite_number() -> None:
    found = CliRunner().invoke(cli.cli, ["serve", "--model", "qwen3-8b", "--tbt-ms", "nan"])
    assert found.exit_code == 2
    assert "nan: give a finite number above 0" in found.output


def test_without_the_extra_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smkern.server.command, "find_spec", lambda name: None)
    error = refused("--model", "qwen3-8b")
    assert "pip install 'smkern[serve]'" in str(error)
