"""What runs in processes of its own: kernels that compile, and the ceilings that a GPU lacks."""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from smkern.autotune import ceilings
from smkern.autotune.compiling import Compiler
from smkern.autotune.stop import Stop
from smkern.profile import load_profile, save_profile
from tests import gpus


def test_what_is_asked_for_is_compiled_and_failures_are_said(tmp_path, capsys):
    made = tmp_path / "made"
    with Compiler(1) as compiler, Stop(120) as stop:
        compiler.start({"good": partial(Path.touch, made), "bad": partial(int, "no number")})
        compiler.start({"good": partial(Path.unlink, made)})  # known already
        assert compiler.wait(["good", "bad"], stop)
        compiler.report()
    assert made.exists()
    assert "1 variants do not compile: invalid literal" in capsys.readouterr().err


def test_it_ends_at_once_when_the_time_is_up():
    before = set(multiprocessing.active_children())
    with Compiler(1) as compiler, Stop(1e-9) as stop:
        compiler.start({"long": partial(time.sleep, 3600)})
        assert not compiler.wait(["long"], stop)
        started = set(multiprocessing.active_children()) - before
    end = time.monotonic() + 300
    while any(map(runs, started)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(map(runs, started))


def runs(process: multiprocessing.process.BaseProcess) -> bool:
    """By its id: the pool's own thread may have asked for the exit code, which is told once."""
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that nobody measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus.install(monkeypatch, gpus.B200)
    return gpus.B200


def test_ceilings_are_missing_where_neither_user_nor_smkern_has_them(gpu, monkeypatch):
    assert ceilings.are_missing()
    save_profile(replace(load_profile("h200"), info=gpu, source="measured"))
    assert not ceilings.are_missing()
    gpus.install(monkeypatch, load_profile("h200").info)
    assert not ceilings.are_missing()


class FakeProcess:
    """The suite: ends by itself after three looks, unless it is terminated."""

    def __init__(self, status=0):
        self.words, self.status, self.looks, self.returncode = [], status, 3, None

    def started(self, words):
        self.words = words
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def poll(self):
        self.looks -= 1
        if self.looks < 0 and self.returncode is None:
            self.returncode = self.status
        return self.returncode

    def wait(self, timeout):
        pass

    def terminate(self):
        self.returncode = -15


@pytest.mark.parametrize("status", [0, 1])
def test_missing_ceilings_are_measured_first_and_are_no_condition(gpu, monkeypatch, capsys, status):
    process = FakeProcess(status)
    monkeypatch.setattr(ceilings.subprocess, "Popen", process.started)
    with Stop(60) as stop:
        ceilings.ensure(stop)
    assert process.words[1:6] == ["-m", "smkern", "bench", "ceilings", "--quick"]
    assert "--save" in process.words
    told = capsys.readouterr()
    assert "no ceilings of NVIDIA B200 yet" in told.out
    assert ("could not be measured (exit status 1)" in told.err) == bool(status)


def test_ceilings_end_when_the_time_is_up(gpu, monkeypatch, capsys):
    process = FakeProcess()
    monkeypatch.setattr(ceilings.subprocess, "Popen", process.started)
    with Stop(0) as stop:
        ceilings.ensure(stop)
    assert process.returncode == -15
    assert capsys.readouterr().err == ""


def test_ceilings_that_are_there_are_not_measured(monkeypatch):
    info = load_profile("h200").info
    monkeypatch.setattr(ceilings, "device_info", lambda: info)
    with Stop(60) as stop:
        ceilings.ensure(stop)
