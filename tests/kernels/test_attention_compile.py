"""Attention compiled for a device that is absent: lanes stay together, nothing of decode spills."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from smkern.kernels import cuda_source
from smkern.kernels.attention.cuda import CudaVariant
from smkern.tuning.attention.constraints import cuda_team_bytes, most_teams
from tests.kernels.cubins import needs_nvcc, told

pytestmark = pytest.mark.slow


def variant_of(head_dim: int, fp8_cache: bool, scaled: bool, rows: int) -> CudaVariant:
    return CudaVariant(
        kernel="attention_decode", head_dim=head_dim, fp16=False, fp8_cache=fp8_cache,
        softcap=False, rows8=-(-rows // 8), teams=3, tma=False, capability=90,
        scaled=scaled, rows4=rows <= 4,
    )  # fmt: skip


@needs_nvcc
@pytest.mark.parametrize(
    ("head_dim", "fp8_cache", "scaled", "rows"),
    [(128, True, False, 4), (128, True, True, 4), (128, False, True, 4), (64, True, True, 4),
     (128, True, True, 8), (128, False, False, 8)],
)  # fmt: skip
def test_no_code_brings_lanes_together(head_dim, fp8_cache, scaled, rows, tmp_path):
    """Where the compiler took them to part it checked before each shuffle: 9% of fp8's time."""
    variant = variant_of(head_dim, fp8_cache, scaled, rows)
    text = told(variant.compile().cubin, tmp_path, "-sass")
    assert "HMMA" in text
    assert "BRA.DIV" not in text
    assert "WARPSYNC" not in text
    assert not re.search(r"\b(STL|LDL)\b", text), "three teams leave a thread 168 registers"


@needs_nvcc
@pytest.mark.parametrize("head_dim", [96, 256])
def test_prompts_of_e4m3_caches_come_by_boxes(head_dim, tmp_path):
    variant = variant_of(head_dim, True, False, 4)
    prompts = replace(variant, kernel="attention_prefill", teams=2, tma=True, brief=True)
    text = told(prompts.compile().cubin, tmp_path, "-sass")
    assert text.count("UTMALDG.4D") == 4, "of keys and values, two pages or two halves of a row"
    assert "F2FP.F16.E4M3.UNPACK_B" in text


@needs_nvcc
@pytest.mark.parametrize("fp8_cache", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "teams"), [(64, 4), (64, 2), (96, 3), (128, 3), (128, 2), (256, 1)]
)
def test_a_team_takes_the_shared_memory_that_it_is_given(
    head_dim, teams, fp8_cache, tmp_path, monkeypatch
):
    shutil.copytree(cuda_source.source_folder(), tmp_path / "csrc")
    monkeypatch.setattr(cuda_source, "source_folder", lambda: tmp_path / "csrc")
    for rows in (range(1, 5), range(5, 9)):
        said = [cuda_team_bytes(head_dim, 1 if fp8_cache else 2, r, teams) for r in rows]
        # a kernel of up to 4 rows has room for 4 where it is compiled for that many
        asked = [max(r, 4) if r <= 4 and head_dim <= 128 else r for r in rows]
        checks = [
            f"static_assert(decode::team_bytes({r}) == {n});\n"
            for r, n in zip(asked, said, strict=True)
        ]
        probe = '#include "attention_decode.cuh"\n' + "".join(checks)
        (tmp_path / "csrc" / "probe.cu").write_text(probe)
        variant = replace(variant_of(head_dim, fp8_cache, False, rows[-1]), teams=teams)
        assert cuda_source.compile_cuda("probe.cu", variant.defines, "sm_90a")


def test_three_teams_of_eight_rows_fit():
    assert most_teams(128, 2, 8) == most_teams(128, 1, 8) == 3
