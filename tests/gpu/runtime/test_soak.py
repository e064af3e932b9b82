"""A minute of a soak on a GPU: random splits, cancellations, pages that run out.

The soak's twenty minutes are segments of `smkern bench runtime --only soak --soak-s 480`.
"""

from __future__ import annotations

from pathlib import Path

from smkern.bench.runtime.cases import SOAK_LEAKS, SOAK_MINUTES
from smkern.bench.runtime.correct import soak_cells
from smkern.bench.runtime.soak import Soak
from tests.gpu.runtime.test_bit_equal import PLAN, weights


def test_a_minute(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    cells = {cell["case"]["name"]: cell for cell in soak_cells(PLAN, weights, path, 60.0)}
    leaks, minutes = cells[SOAK_LEAKS], cells[SOAK_MINUTES]
    assert not leaks["leaks"]
    assert minutes["unjudged_minutes"] >= 1, "too short to tell a leak of memory"
    for name in ("preemptions", "switches", "cancelled"):
        assert minutes[name], name
    assert minutes["tokens"] > 10_000
    (segment,) = Soak.load(path, minutes["case"]["model"] + " of 4 layers").segments
    assert segment.left is not None
    assert segment.left.held_pages == 0
