"""The command's options: what they ask for, and which are refused."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner

from smkern.autotune import main, operators, run
from smkern.device import Budget
from smkern.errors import ConfigError, DeviceError
from smkern.profile import profile_for
from tests import gpus


def invoke(*arguments):
    return CliRunner().invoke(main.command, list(arguments))


@pytest.fixture(autouse=True)
def planned(profile, monkeypatch):
    monkeypatch.setattr(run, "load_profile", lambda index=None: profile)


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [
        ("--quick --top 4", 4),
        ("--op append --heads 32x8x128 --budgets 16,32", 16),
        ("--op attention", 432),
        ("--op attention --quick --cache-dtype fp8", 4),
        ("--op attention --heads 8x2x64 --budgets 32 --confined both", 24),
        ("--op sample --quick --budgets 16,32", 8),
        ("--op moe --quick --budgets 16,32", 12),
        ("--op grouped_gemm --quick --budgets 16,32", 8),
        ("--op gemm_fp8 --shapes 6144x4096 --ms 16,64 --budgets 24,132", 8),
    ],
)
def test_a_dry_run_says_what_would_be_measured_and_needs_no_gpu(arguments, cells):
    ran = invoke("--dry-run", *arguments.split())
    assert ran.exit_code == 0, ran.output
    assert re.match(rf"{cells} cells, \d+ candidates, for NVIDIA H200", ran.output)


@pytest.mark.parametrize("info", gpus.FOREIGN, ids=gpus.by_name)
@pytest.mark.parametrize("op", main.OPS)
def test_a_dry_run_is_of_any_gpu(op, info, monkeypatch):
    monkeypatch.setattr(run, "load_profile", lambda: profile_for(info))
    ran = invoke("--dry-run", "--quick", "--op", op)
    if op == "gemm_fp8" and info.capability < (8, 9):
        assert isinstance(ran.exception, DeviceError)
        return
    assert ran.exit_code == 0, ran.output
    is_tuned = op != "gemm_fp8" or info.capability[0] == 9
    assert ran.output.startswith("0 cells") != is_tuned
    assert f" for {info.name}" in ran.output


@pytest.mark.parametrize("info", [gpus.A100, gpus.L40S, gpus.B200], ids=gpus.by_name)
def test_a_model_in_fp8_has_cells_of_kernels_that_the_gpu_has(info, monkeypatch):
    monkeypatch.setattr(run, "load_profile", lambda: profile_for(info))
    ran = invoke("--dry-run", "--model", "qwen3-8b-fp8", "--budgets", "32")
    if info.capability < (8, 9):
        assert isinstance(ran.exception, DeviceError)
        assert "has no e4m3" in str(ran.exception)
    else:
        assert "attention: " in ran.output
        assert "gemm_fp8" not in ran.output


def test_gemm_swiglu_is_tuned_by_its_inner_width():
    options = operators.Options(shapes=[(14336, 4096)], ms=(8, 64))
    found = [case.problem for case in operators.OPERATORS["gemm_swiglu"](options).cases]
    assert [(p.m, p.n, p.k, p.epilogue.key) for p in found] == [
        (8, 28672, 4096, "swiglu"),
        (64, 28672, 4096, "swiglu"),
    ]


@pytest.mark.parametrize("op", main.OPS)
def test_every_operator_has_cases(op):
    for quick in (False, True):
        work = operators.OPERATORS[op](operators.Options(quick=quick))
        key_of = work.family.tuned.key_of
        keys = {key_of(case.problem, Budget(16)) for case in work.cases}
        assert len(keys) == len(work.cases) > 0


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for arguments in (["--quick"], ["--model", "qwen3-8b"]):
        assert isinstance(invoke(*arguments).exception, DeviceError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epilogue", "relu"], "epilogue 'relu'"),
        (["--op", "attention", "--heads", "8x3x64"], "QxKVxD"),
        (["--top", "0"], "not in the range"),
        (["--shapes", "6144"], "is not NxK"),
        (["--minutes", "0"], "0: give a finite number above 0"),
        (["--model", "qwen3-8b", "--minutes", "-3"], "-3: give a finite number above 0"),
        (["--model", "qwen3-8b", "--minutes", "nan"], "nan: give a finite number above 0"),
        (["--model", "qwen3-8b", "--op", "sample", "--ms", "8"], "chooses op, ms itself"),
        (["--model", "qwen3-8b", "--tp", "0"], "not in the range"),
        (["--check"], "give --model too"),
        (["--tp", "2"], "give --model too"),
    ],
)
def test_bad_options_are_named(arguments, message):
    ran = invoke("--dry-run", *arguments)
    assert ran.exit_code == 2
    assert re.search(message, ran.output)


def test_an_unknown_model_is_named():
    ran = invoke("--model", "gpt-5", "--dry-run")
    assert isinstance(ran.exception, ConfigError)
    assert "'gpt-5' is no folder, and no preset: there is llama-3.1-8b" in str(ran.exception)
