"""The stamp of what a model launches: what changes it; the shipped tables carry today's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from smkern.latency import TablePredictor, stamp
from smkern.latency.model_gemms import problems_of
from smkern.latency.sizes import ModelSizes
from smkern.latency.stamp import kernels_hash
from smkern.latency.table import SHIPPED, read_timings
from smkern.latency.table_predictor import _warn_if_stale
from smkern.models import preset
from smkern.models.presets import presets
from smkern.tuning import cells
from smkern.tuning.append import AppendConfig, AppendKey
from smkern.tuning.attention.key import AttentionKey
from smkern.tuning.attention.shapes import AttentionConfig
from smkern.tuning.cells import PROVENANCE, Tuned, user_path
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.families import FAMILIES
from smkern.tuning.grouped import GroupedConfig, GroupedKey
from smkern.tuning.moe import MoeConfig, MoeKey
from smkern.tuning.sample import SampleConfig, SampleKey
from smkern.tuning.table import Cell, CellKey

pytestmark = pytest.mark.slow

GPU = "NVIDIA H200"
META = dict.fromkeys(PROVENANCE, "x") | {"gpu": GPU}
TABLES = sorted(SHIPPED.glob("*/*.json"))


@pytest.fixture(autouse=True)
def _forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tables of one's own, and nothing kept of them for other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def forget() -> None:
    for cached in (kernels_hash, _warn_if_stale):
        cached.cache_clear()


def hashed(model: str, gpu: str = GPU) -> str:
    """As a process that begins now: it reads one's own tables anew; the shipped ones and the
    code are as they were."""
    forget()
    return kernels_hash(gpu, ModelSizes.of(preset(model)))


def tune(name: str, key: Any, tuned: Any) -> None:
    """Write a cell as the user's own."""
    family = next(family for family in FAMILIES if family.name == name)
    family.file(user_path(GPU, name)).merge({key: tuned}, META)


def tune_gemm(n: int, k: int) -> None:
    config = GemmConfig("ws", 64, 128, 64)
    key = CellKey.of(GemmProblem(33, n, k), Budget(30, "mask"))
    tune("gemm", key, Cell(config, 1.0, config, 1.0))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_shipped_table_is_of_these_kernels_and_cells(path: Path) -> None:
    table, sizes = read_timings(path)
    assert table.meta["kernels"] == kernels_hash(table.meta["gpu"], sizes)


def test_it_is_a_gpus_and_a_models() -> None:
    assert hashed("qwen3-8b") == hashed("qwen3-8b", "h200")
    assert len({hashed("qwen3-8b"), hashed("qwen3-8b", "none"), hashed("qwen3-32b")}) == 3


@pytest.mark.parametrize("model", presets())
def test_the_weights_are_those_of_a_models_gemms(model: str) -> None:
    config = preset(model)
    weights = stamp._weights(ModelSizes.of(config))
    assert set(weights["gemm"]) == {(found.n, found.k) for found in problems_of(config, 1, 1)}
    assert bool(weights["gemm_fp8"]) == (config.quantization is not None)


def test_a_cell_of_another_weight_changes_nothing() -> None:
    first = {model: hashed(model) for model in ("qwen3-8b", "qwen3-14b", "qwen3-30b-a3b")}
    tune_gemm(7168, 5120)
    assert [model for model in first if hashed(model) != first[model]] == ["qwen3-14b"]


def test_a_cell_of_ones_own_makes_a_table_stale(recwarn: pytest.WarningsRecorder) -> None:
    tune_gemm(7168, 5120)
    TablePredictor.load("qwen3-8b", GPU)
    assert not recwarn
    forget()
    tune_gemm(6144, 4096)
    with pytest.warns(UserWarning, match=r"other kernels or tuned tables \(smkern autotune's incl"):
        TablePredictor.load("qwen3-8b", GPU)


def test_a_cell_of_ones_own_that_is_the_shipped_one_changes_nothing() -> None:
    first = hashed("qwen3-8b")
    for family in FAMILIES:
        shipped = family.file(cells.shipped_path(GPU, family.name)).load().cells
        for key in list(shipped)[::50]:
            tune(family.name, key, shipped[key])
    assert hashed("qwen3-8b") == first


def heads(num_q_heads: int) -> AttentionKey:
    return AttentionKey(
        "paged_attention", "decode", num_q_heads, 8, 128, 16, "bf16", "bf16", 2, 1, 64, 30, "mask"
    )


def append_of(num_q_heads: int) -> AppendKey:
    return AppendKey(
        "qk_norm_rope_append", num_q_heads, 8, 128, 128, True, "bf16", "bf16", 2, 30, "mask"
    )


TUNED: Sequence[tuple[str, Callable[[int], Any], Any, dict[str, int]]] = [
    ("attention", heads, AttentionConfig(), {"qwen3-8b": 32, "qwen3-32b": 64}),
    ("append", append_of, AppendConfig(), {"qwen3-8b": 32, "qwen3-32b": 64}),
    ("sample", lambda vocab: SampleKey(vocab, "bf16", 2, 30, "mask"), SampleConfig(),
     {"qwen3-8b": 163_840, "llama-3.1-8b": 131_072}),
    ("moe", lambda experts: MoeKey("topk_softmax", experts, 8, 0, 2, 30, "mask"), MoeConfig(),
     {"qwen3-30b-a3b": 128, "qwen3-8b": 0}),
    ("grouped_gemm", lambda experts: GroupedKey(experts, 9, 9, False, "bf16", 2, 30, "mask"),
     GroupedConfig(), {"qwen3-30b-a3b": 128, "qwen3-8b": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "key", "config", "of"), TUNED, ids=[row[0] for row in TUNED])
def test_cells_of_other_heads_vocabularies_and_experts_change_nothing(
    name: str, key: Callable[[int], Any], config: Any, of: dict[str, int]
) -> None:
    one, other = of
    first = hashed(one), hashed(other)
    tune(name, key(of[one]), Tuned(config, 1.0))
    assert hashed(one) != first[0]
    assert hashed(other) == first[1]


@pytest.mark.parametrize("text", ["", '{"format": "smkern-table", "version": 1, "cells": [', "[]"])
def test_a_broken_table_of_ones_own_counts_as_none(text: str) -> None:
    first = hashed("qwen3-8b")
    path = user_path(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert hashed("qwen3-8b") == first


def test_code_is_told_from_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("csrc", "kernels/fp8", "kernels/cute"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(stamp, "_PACKAGE", tmp_path)
    monkeypatch.setattr(stamp, "_sources", stamp._sources.__wrapped__)

    def of(code: str, cuda: str = "f();", model: str = "qwen3-8b") -> str:
        (tmp_path / "kernels/a.py").write_text(code)
        (tmp_path / "csrc/a.cu").write_text(cuda)
        return hashed(model)

    first, small = of("x = 1\n"), of("x = 1", model="qwen3-8b-fp8")
    assert of('"""Words."""\n# more\nx  = 1  # one\n', "// words\nf(); /* or\ntwo */") == first
    assert len({first, of("x = 2"), of("x = 1", "g();")}) == 3
    (tmp_path / "kernels/cute/a.py").write_text("x = 3")
    assert of("x = 1") == first, "a profile launches none of these"
    (tmp_path / "kernels/fp8/a.py").write_text("x = 3")
    assert of("x = 1") == first, "no model of bf16 launches these"
    assert of("x = 1", model="qwen3-8b-fp8") != small


def test_the_cost_models_constants_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h200/cost_model.json"
    path.parent.mkdir()
    known = json.loads(cells.shipped_path(GPU, "cost_model").read_text())
    monkeypatch.setattr(cells, "SHIPPED", tmp_path)

    def of(launch_us: float, date: str, gpu: str) -> str:
        changed = {"constants": known["constants"] | {"launch_us": launch_us}}
        path.write_text(json.dumps(known | changed | {"meta": {"date": date}}))
        stamp.load_constants.cache_clear()
        return hashed("qwen3-8b", gpu)

    for gpu in (GPU, "NVIDIA H100 80GB HBM3"):
        assert of(1.0, "then", gpu) == of(1.0, "now", gpu) != of(2.0, "now", gpu)
    stamp.load_constants.cache_clear()
