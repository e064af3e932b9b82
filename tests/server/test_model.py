"""What a command's options make of a model: its weights, and the dtype of its pool."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from smkern.errors import ArgumentError, BudgetError, ConfigError, WeightsError
from smkern.models import Decoder, Quantization
from smkern.partition import plan_ladder
from smkern.server import RUNGS, model
from smkern.server.command import command
from smkern.server.model import EngineOptions, open_runtime, rungs_of
from tests import gpus
from tests.models.generation import greedy, random_prompts, tiny
from tests.models.peers import make_peer

SIZES: dict[str, Any] = {"rungs": (), "max_running": 4, "num_pages": 64, "max_tokens": 64}


@pytest.mark.parametrize("quantization", [None, "fp8-block"])
@pytest.mark.parametrize(
    ("cache", "dtype"), [("auto", torch.bfloat16), ("fp8", torch.float8_e4m3fn)]
)
def test_weights_and_pool_in_fp8(quantization: Any, cache: str, dtype: torch.dtype):
    config = tiny(hidden_size=128, intermediate_size=128, dtype=torch.bfloat16)
    options = EngineOptions(
        config, policy="chunked:64", device="cpu", quantization=quantization,
        kv_cache_dtype=cache, **SIZES,
    )  # fmt: skip
    said: list[str] = []
    with open_runtime(options, said.append) as (mux, ready):
        executor: Any = mux._executor
        assert executor.pool.sizes.dtype is dtype
        decoder: Decoder = executor._model
        want = None if quantization is None else Quantization("fp8-block")
        assert decoder.config.quantization == want
        handle = mux.submit(random_prompts([9])[0], greedy(5))
        for _ in mux.run():
            pass
        assert len(handle.tokens) == 5
        assert ready.kv_tokens == 64 * 16
    (line,) = said  # on a CPU nothing is compiled and captured
    assert re.fullmatch(r"weights are there, \d+ s", line)


def test_gemms_are_priced_only_for_a_policy_that_asks(monkeypatch: pytest.MonkeyPatch):
    priced: list[Any] = []
    monkeypatch.setattr(model, "predictor_for", lambda *given, **_: priced.append(given))
    for policy in ("chunked:64", "prefill_first"):
        with open_runtime(EngineOptions(tiny(), policy=policy, device="cpu", **SIZES)):
            assert not priced
    with pytest.raises(ArgumentError, match="without a predictor"):
        open_runtime(EngineOptions(tiny(), policy="chunked", device="cpu", **SIZES)).__enter__()
    assert len(priced) == 1


@pytest.mark.parametrize("info", [gpus.H200, *gpus.FOREIGN], ids=gpus.by_name)
def test_the_default_rungs_are_those_that_a_gpu_has(info):
    found = rungs_of(None, info)
    assert plan_ladder(info, found).rungs == found
    assert found == RUNGS if info.num_sms >= 72 else found == plan_ladder(info).rungs
    assert rungs_of(None, replace(info, num_sms=60)) == RUNGS[: RUNGS.index(52) + 1]
    assert rungs_of((), info) == ()


def test_rungs_that_a_gpu_has_not_are_refused_before_weights(monkeypatch: pytest.MonkeyPatch):
    gpus.install(monkeypatch, gpus.A100)
    options = EngineOptions("qwen3-8b", rungs=(16, 22))
    said = r"--rungs: a decode side of 22 SMs .*A100.* take a multiple of 4 from 4 to 104"
    with pytest.raises(BudgetError, match=said):
        open_runtime(options).__enter__()


def test_tokens_that_end_a_text_are_added_to_the_models():
    config = tiny(eos_token_ids=(2,))
    options = EngineOptions(config, policy="chunked:64", device="cpu", end_tokens=(7,), **SIZES)
    with open_runtime(options) as (mux, _):
        executor: Any = mux._executor
        assert executor.config.eos_token_ids == (2, 7)


def test_sizes_that_blocks_do_not_divide_are_refused():
    options = EngineOptions(tiny(), device="cpu", quantization="fp8-block", **SIZES)
    with pytest.raises(ConfigError, match="hidden_size=64 with quantization 'fp8-block'"):
        open_runtime(options).__enter__()


def test_a_checkpoint_of_another_dtype_is_converted_where_that_is_asked_for(tmp_path: Path):
    """As fp32 ones whose config.json names no dtype."""
    make_peer("qwen3", dtype="bfloat16").model.float().save_pretrained(tmp_path)
    contents = json.loads((tmp_path / "config.json").read_text())
    del contents["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(contents))
    given: dict[str, Any] = {"policy": "chunked:64", "device": "cpu", **SIZES}
    with pytest.raises(WeightsError, match=r"says nothing\): .* --dtype bfloat16\), or set"):
        open_runtime(EngineOptions(str(tmp_path), **given)).__enter__()
    for name in ("bfloat16", "float16"):
        with open_runtime(EngineOptions(str(tmp_path), dtype=name, **given)) as (mux, _):
            executor: Any = mux._executor
            assert executor.config.dtype is executor.pool.sizes.dtype is getattr(torch, name)


@pytest.mark.parametrize(
    ("words", "said"), [(["--quantization", "awq"], "fp8-block"), (["--dtype", "int8"], "bfloat16")]
)
def test_other_quantizations_and_dtypes_are_no_choice(words: list[str], said: str):
    found = CliRunner().invoke(command, ["--model", "qwen3-8b", *words])
    assert found.exit_code == 2
    assert said in found.output
