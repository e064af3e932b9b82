"""How far off a prediction may be, by how far it is from what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from math import log2

from smkern.latency.table import Kind, Timing
from smkern.latency.work import Size

AT_A_CELL = 0.024
"""Relative error beside a measured launch: requests that are unlike take longer or less."""
AN_OCTAVE = 0.003
"""What an octave of SMs, rows, tokens or keys away from the nearest launch adds."""
TOLD = 0.05
"""Beside launches of another model, or of another GPU of the architecture: 3.4 to 6% were seen."""
MOST = 0.3


class Confidence:
    """Expected relative errors of launches alone.

    Args:
        cells: What was measured; cells beside other work are passed over.
    """

    def __init__(self, cells: Iterable[Timing]) -> None:
        self._at_a_cell = AT_A_CELL
        self._points: dict[Kind, list[tuple[float, ...]]] = {}
        for cell in cells:
            if not cell.beside_sms:
                point = _point(cell.size(1), cell.num_sms)
                self._points.setdefault(cell.kind, []).append(point)

    def told(self, at_a_cell: float) -> Confidence:
        """The same for what is told from the cells, with so large an error beside them at least."""
        other = copy(self)
        other._at_a_cell = max(self._at_a_cell, at_a_cell)
        return other

    def error(self, size: Size, num_sms: int) -> float:
        """The mean relative error to be expected of a launch's prediction; 0.03 is 3%."""
        points = self._points.get(size.kind)
        if not points:
            return MOST
        point = _point(size, num_sms)
        away = min(sum(abs(a - b) for a, b in zip(point, other, strict=True)) for other in points)
        return min(self._at_a_cell + AN_OCTAVE * away, MOST)


def _point(size: Size, num_sms: int) -> tuple[float, ...]:
    """SMs, rows, keys of a row, new tokens and cached ones in front of each, in octaves."""
    new = size.new_tokens
    behind = sum(chunk.new * chunk.cached for chunk in size.chunks) / new if new else 0.0
    context = size.total_kv / size.batch if size.batch else 0.0
    return tuple(log2(1 + x) for x in (num_sms, size.batch, context, new, behind))
