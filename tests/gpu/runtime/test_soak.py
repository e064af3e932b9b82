"""A soak on a GPU: random splits, cancellations, pages that run out; a minute unless told more.

`tests/runtime/soak.py` says how segments of it become the soak's hour.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.gpu.runtime.test_bit_equal import weights
from tests.runtime.results import PLAN, record, soak_cells
from tests.runtime.soak import SIZES, Soak, run_segment

LAYERS = 4
SECONDS = float(os.environ.get("SMKERN_SOAK_S", "60"))


def test_a_segment(tmp_path: Path) -> None:
    path = Path(os.environ.get("SMKERN_SOAK_FILE", tmp_path / "runtime.soak"))
    model = f"{PLAN.model} of {LAYERS} layers"
    try:
        run_segment(weights(LAYERS), SIZES, path, model, SECONDS)
    finally:  # a segment that raised is a failure of the soak for good
        state = Soak.load(path, model)
        if state.segments:
            record(soak_cells(state, LAYERS))
    segment = state.segments[-1]
    assert not state.leaks
    assert segment.seconds >= SECONDS
    for name in ("preemptions", "switches", "cancelled"):
        assert getattr(segment, name), name
    assert segment.tokens > 10_000
    assert segment.left is not None
    assert segment.left.held_pages == 0
