"""Files of timings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smkern.errors import TableError
from smkern.latency.profile_file import read_profile
from smkern.latency.sizes import ExpertSizes, ModelSizes
from smkern.latency.table import Timing, TimingLines, latency_file, read_timings
from smkern.tuning.cells import PROVENANCE
from tests.latency.small import SIZES, TIMINGS

META: dict[str, Any] = dict.fromkeys(PROVENANCE, "x") | {"gpu": "NVIDIA H200"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    latency_file(path).merge(TIMINGS, META | {"sizes": SIZES.to_json()})
    cells, sizes = read_timings(path)
    assert cells.cells == TIMINGS
    assert sizes == SIZES


def test_a_line_has_what_is_not_zero() -> None:
    line = TimingLines().encode(Timing("decode", 16, batch=4, context=100), 12.3456)
    assert line == {"kind": "decode", "num_sms": 16, "batch": 4, "context": 100, "us": 12.35}


def test_sizes_of_experts_come_back() -> None:
    from smkern.models import preset

    sizes = ModelSizes.of(preset("qwen3-30b-a3b"))
    assert sizes.moe == ExpertSizes(128, 8, 768)
    assert ModelSizes.from_json(json.loads(json.dumps(sizes.to_json()))) == sizes


def test_sizes_of_weights_in_fp8_come_back() -> None:
    from smkern.models import Quantization, preset

    config = preset("qwen3-8b")
    plain, small = (
        ModelSizes.of(config.replace(quantization=given))
        for given in (None, Quantization("fp8-block"))
    )
    assert (plain.linear_bytes, small.linear_bytes) == (2, 1)
    assert "linear_bytes" not in plain.to_json()
    for sizes in (plain, small):
        assert ModelSizes.from_json(json.loads(json.dumps(sizes.to_json()))) == sizes
    with pytest.raises(ValueError, match="weights of 4 bytes"):
        ModelSizes.from_json(plain.to_json() | {"linear_bytes": 4})


@pytest.mark.parametrize("name", ["q_size", "kv_size"])
def test_heads_are_whole_and_there_are_some(name: str) -> None:
    from smkern.models import preset

    plain = ModelSizes.of(preset("qwen3-8b"))
    with pytest.raises(ValueError, match="sizes of 0"):
        ModelSizes.from_json(plain.to_json() | {name: 0})
    for size in (plain.head_dim // 2, plain.head_dim + 1):
        with pytest.raises(ValueError, match="no whole number of heads of 128"):
            ModelSizes.from_json(plain.to_json() | {name: size})


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "decode", "num_sms": 16, "batch": 1, "us": 1.0},
        {"kind": "prefill", "num_sms": 16, "prompts": 1, "us": 1.0},
        {"kind": "prefill", "num_sms": 16, "prompts": 1, "tokens": 9, "batch": 1, "us": 1.0},
        {"kind": "other", "num_sms": 16, "batch": 1, "context": 1, "us": 1.0},
        {"kind": "decode", "num_sms": 0, "batch": 1, "context": 1, "us": 1.0},
        {"kind": "decode", "num_sms": 16, "batch": 1, "context": 1, "us": 0.0},
        {"kind": "decode", "num_sms": 16, "batch": 1, "context": 1, "us": 1e-200},
        {"kind": "decode", "num_sms": 16, "batch": 1.5, "context": 1, "us": 1.0},
        {"kind": "decode", "num_sms": 16, "batch": 1, "context": 1},
        {"kind": "decode", "num_sms": 16, "batch": 1, "context": 1, "us": 1.0, "more": 2},
    ],
)
def test_lines_that_are_none(tmp_path: Path, line: dict[str, Any]) -> None:
    path = tmp_path / "model.json"
    head = {"format": "smkern-table", "version": 1, "meta": META | {"sizes": SIZES.to_json()}}
    path.write_text(json.dumps(head | {"cells": [line]}))
    with pytest.raises(TableError, match=r"has an invalid cell.*bench latency-table"):
        read_timings(path)


def test_a_file_without_sizes_or_cells(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    with pytest.raises(TableError, match="is not there"):
        read_timings(path)
    latency_file(path).merge(TIMINGS, META)
    with pytest.raises(TableError, match="lacks the sizes"):
        read_timings(path)


def test_nobody_is_told_to_delete_a_file_that_is_no_table(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    for read in (read_timings, read_profile):
        with pytest.raises(TableError, match=r"pass .* smkern (bench latency-table|profile)") as no:
            read(path)
        assert "delete it" not in str(no.value)
