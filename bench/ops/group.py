"""One operator at one size in one budget: every rival checked once, timed in the same rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smkern.bench.contest import Contender, Contest, cell_head, checked_call, note_again
from smkern.bench.named import Group
from smkern.bench.ops.cases import OpCase
from smkern.bench.ops.providers import OpPeers
from smkern.bench.ops.rows import is_losing
from smkern.measure.timing import Call, Timing

Cell = dict[str, Any]


@dataclass(slots=True)
class OpRunner(Contest):
    """Measures groups in partitions."""

    budget_us: float = 25_000.0

    def measure(self, group: Group[OpCase], peers: OpPeers, *, again: bool = True) -> list[Cell]:
        """The cells of a group; a provider that cannot run has an `error`.

        A group that loses to a peer is measured a second time; both results stand.
        """
        place = self.partitions.at(group.num_sms)
        if place is None:
            return []
        places = dict.fromkeys((place, self.partitions.at(group.num_sms, "default")))
        contenders = [peers.ours(place)]
        contenders += [c for at in places if at is not None for c in peers.at(at)]
        cells = self._round(group, peers, contenders)
        if again and any(is_losing(cell) for cell in cells):
            cells = note_again(cells, self._round(group, peers, contenders))
        return cells

    def _round(
        self, group: Group[OpCase], peers: OpPeers, contenders: Sequence[Contender]
    ) -> list[Cell]:
        case = group.case

        def check(contender: Contender, errors: dict[str, str]) -> Call | None:
            peers.rivals.reset()
            return checked_call(contender, errors, peers.rivals.complaint)

        def cell(contender: Contender, timing: Timing | None, error: str | None) -> Cell:
            head = cell_head(case.op, case.about, contender.place, contender.provider)
            figures = self.figures(case, contender, timing, error)
            return head | dict(contender.about) | figures | {"group_sms": group.num_sms}

        return self.round(contenders, check, cell)
