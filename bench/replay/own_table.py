"""A latency table of one's own, in place of the shipped one of a model."""

from __future__ import annotations

from pathlib import Path

from smkern.errors import TableError
from smkern.latency import TablePredictor
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import read_timings
from smkern.models import preset
from smkern.profile import Profile


def read_own(path: Path, model: str, profile: Profile) -> TablePredictor:
    """The predictor of a table, for replays of a model.

    Args:
        path: What `smkern bench latency-table` wrote.
        model: A preset's name.
        profile: The device that serves.

    Raises:
        TableError: no valid table, one of another GPU, or of a model of other sizes.
    """
    predictor = TablePredictor.read(path, profile)
    if predictor.sizes != ModelSizes.of(preset(model)):
        timed = read_timings(path)[0].meta.get("model")
        raise TableError(
            f"{path} has the times of {timed!r}, whose sizes are not those of {model!r}: give "
            f"--model {timed}, or a table of {model}, which smkern profile --model {model} and "
            "smkern bench latency-table make"
        )
    return predictor
