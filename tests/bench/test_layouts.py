"""The suite of head layouts that nobody tuned."""

from __future__ import annotations

from smkern.bench.attention.layouts import CASES, HEADS, summarize
from smkern.tuning.attention.constraints import CUDA_HEAD_DIMS


def test_the_cases_are_decode_steps_of_all_kinds_of_heads() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 27
    assert {case.kind for case in CASES} == {"decode"}
    assert {case.head_dim for case in CASES} == set(CUDA_HEAD_DIMS)
    groups = {q // kv for q, kv, _ in HEADS}
    assert min(groups) == 1
    assert max(groups) == 71
    assert sum(kv == 1 for _, kv, _ in HEADS) >= 6


def test_the_rows_count_the_second_measurement_of_what_lost() -> None:
    def cell(name: str, ratio: float, **more: float) -> dict:
        about = {"provider": "smkern", "case": {"name": name}, "num_sms": 16}
        return about | {"us": 1.0, "vs_flashinfer": ratio} | more

    rows = summarize([cell("a", 2.0), cell("b", 0.9, vs_flashinfer_again=0.98)])
    assert rows["layouts_geomean_vs_flashinfer"]["value"] == 1.4
    assert rows["layouts_worst_vs_flashinfer"]["value"] == 0.98
    assert not rows["layouts_worst_vs_flashinfer"]["met"]
    assert rows["layouts_worst_vs_flashinfer"]["worst"][0]["case"] == "b"
