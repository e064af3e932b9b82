"""A small model tuned on a GPU: every family has right candidates, a run ends in time, goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from smkern.autotune.main import command
from smkern.autotune.model import families
from smkern.device import device_info

SIZES = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32_000, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
    "rope_theta": 1e6, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SIZES))
    return folder


def tune(folder: Path, *more: str) -> str:
    words = ["--model", str(folder), "--budgets", "16,116", "--out", str(folder / "tables")]
    ran = CliRunner().invoke(command, [*words, *more], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.output


@pytest.mark.slow
def test_a_model_is_tuned_in_parts_and_compared(folder: Path) -> None:
    output = tune(folder, "--minutes", "0.05")
    assert "the time is up" in output
    output = tune(folder, "--minutes", "8")
    assert "are in the table" in output
    assert "the time is up" not in output
    gpu = device_info().name
    for name, family in families(6).items():
        cells = family.tuned.file(folder / "tables" / f"{name}.json").load(gpu).cells
        assert bool(cells) == (name not in ("moe", "grouped_gemm", "gemm_fp8"))
        if cells:
            text = (folder / "tables" / f"{name}.raw.jsonl").read_text()
            lines = [json.loads(line) for line in text.splitlines()]
            own = [x for x in lines if x["config"].get("kernel") != "cublaslt"]
            assert {line.get("error") for line in own} == {None}
    assert tune(folder).startswith("0 cells to measure")
    report = tune(folder, "--check")
    assert "tuned over untuned" in report
    assert "gemm: " in report
