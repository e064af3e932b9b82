"""Partitions on the virtual clock, and a meter that always reads the same."""

from __future__ import annotations

from smkern.device import Budget
from smkern.measure.partitions import Place


class FakePartitions:
    """Every even budget has a spread place, multiples of 8 a default one; 132 is the chip."""

    def __init__(self, cuda, *options) -> None:
        self.cuda = cuda
        self.full = Place(Budget(132, "grid", True), cuda.new_stream())
        self.places = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def at(self, num_sms, placement="spread"):
        if num_sms == 132:
            return self.full
        if num_sms % (2 if placement == "spread" else 8):
            return None
        if (num_sms, placement) not in self.places:
            budget = Budget(num_sms, "mask", placement == "default")
            self.places[num_sms, placement] = Place(budget, self.cuda.new_stream(), placement)
        return self.places[num_sms, placement]


class Meter:
    last = (1980.0, 400.0)

    def __call__(self) -> None:
        return None
