"""A short profile on the GPU: two layers of an 8B model, a cell of each kind."""

from __future__ import annotations

from math import inf
from pathlib import Path

import torch

from smkern.latency import Chunk
from smkern.latency.profile_file import ProfileFile
from smkern.measure import profiler
from smkern.measure.profile_command import open_launches
from smkern.measure.profile_plan import Cell
from smkern.measure.profiler import Profiler
from smkern.measure.sm_clock import clock_on
from smkern.models import preset

CELLS = [
    Cell(24, (2048,) * 64),
    Cell(24, (), (Chunk(1024),)),
    Cell(24, (2048,) * 64, (Chunk(1024),)),
    Cell(None, (2048,) * 64, (Chunk(192, 512),), mixed=True),
]
SHORT = [Cell(24, (), (Chunk(16),)), Cell(24, (2048,) * 64, (Chunk(16, 512),))]


def test_cells_of_every_kind_are_timed(tmp_path: Path) -> None:
    config = preset("qwen3-8b").replace(num_layers=2)
    with open_launches(config, [24]) as (launches, _):
        clock = clock_on(torch.device("cuda"))
        made = Profiler(launches, ProfileFile(tmp_path / "unused"), clock, patience=0.3)
        lines = [line for cell in CELLS for line in made.cell(cell)]
    assert len(lines) == 5, "a step, a prompt, each beside the other, both in one forward"
    for line in lines:
        assert line.sample.us > 0
        assert 0 < line.about["mhz"] < 2200


def test_short_prompts_do_not_wait_for_the_host(tmp_path: Path, monkeypatch) -> None:
    """As graphs they take less than their launching, alone and in front of a decode step."""
    config = preset("qwen3-8b").replace(num_layers=2)
    monkeypatch.setattr(profiler, "BY_HOST", inf)
    with open_launches(config, [24]) as (launches, _):
        made = Profiler(launches, ProfileFile(tmp_path / "unused"), patience=0.3)
        (alone,), (_, beside) = (made.cell(cell) for cell in SHORT)
    assert alone.sample.size.head
    assert beside.sample.size.head
    assert 0 < alone.sample.us < beside.sample.us
