"""One attention case in one budget: every provider checked once, then timed in the same rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from smkern.bench.attention.cases import AttentionGroup
from smkern.bench.attention.providers import Peers, our_contenders, plan_of
from smkern.bench.cells import failed_cell
from smkern.bench.contest import Contender, Contest, cell_head, checked_call, note_again
from smkern.measure.attention import AttentionOperands
from smkern.measure.partitions import Place
from smkern.measure.timing import Call, Case, Timing, time_interleaved, try_eagerly

Cell = dict[str, Any]

OP, PLAN_OP = "paged_attention", "plan_attention"
TOLERANCE = 2e-2
"""|out - reference| / |reference| of a bf16 result; bf16 probabilities alone give 3e-3."""
PLAN_CALLS = 32


def is_losing(cell: Cell) -> bool:
    """Whether one of our cells, as dispatched, is slower than FlashInfer's best way."""
    return cell["provider"] == "smkern" and (cell.get("vs_flashinfer") or 1.0) < 1.0


@dataclass(slots=True)
class AttentionRunner(Contest):
    """Measures groups in partitions."""

    budget_us: float = 150_000.0

    def measure(
        self, group: AttentionGroup, ops: AttentionOperands, peers: Peers, *, again: bool = True
    ) -> list[Cell]:
        """The cells of a group: attention by every provider and place, and the plan itself.

        A provider that cannot run has an `error`. Of a peer's cache layouts the better counts.
        A group that loses to FlashInfer is measured a second time; both results stand.
        """
        place = self.partitions.at(group.num_sms)
        if place is None:
            return []
        ours = list(our_contenders(ops, place))
        places = dict.fromkeys((place, self.partitions.at(group.num_sms, "default")))
        contenders = ours + [c for at in places if at is not None for c in peers.at(at)]
        cells = self._attention(group, ops, contenders)
        if again and any(is_losing(cell) for cell in cells):
            cells = note_again(cells, self._attention(group, ops, contenders))
        return [*cells, self._plan(group, ops, place)]

    def _attention(
        self, group: AttentionGroup, ops: AttentionOperands, contenders: list[Contender]
    ) -> list[Cell]:
        def cell(contender: Contender, timing: Timing | None, error: str | None) -> Cell:
            head = cell_head(OP, group.case.about, contender.place, contender.provider)
            figures = self.figures(group.case, contender, timing, error)
            return head | dict(contender.about) | figures | {"group_sms": group.num_sms}

        return self.round(contenders, lambda c, errors: checked(c, ops, errors), cell)

    def _plan(self, group: AttentionGroup, ops: AttentionOperands, place: Place) -> Cell:
        """The plan by itself: refilled on the device, many times in one graph."""
        cell = cell_head(PLAN_OP, group.case.about, place, "smkern")
        cell["group_sms"] = group.num_sms
        errors: dict[str, str] = {}
        try:
            plan = plan_of(ops, place)
        except Exception as error:  # noqa: BLE001  a cell that cannot be measured says why
            return cell | failed_cell(f"{type(error).__name__}: {error}".splitlines()[0])

        def call(i: int) -> None:
            plan_of(ops, place, out=plan)

        message = try_eagerly(call, place.stream)
        if message is None:
            case = Case(call, place.stream, PLAN_CALLS)
            timings = time_interleaved({"plan": case}, rounds=7, errors=errors)
            if "plan" in timings:
                timing = timings["plan"]
                return cell | {"us": round(timing.us_median, 3), "noise": round(timing.noise, 4)}
            message = errors["plan"]
        return cell | failed_cell(message)


def checked(contender: Contender, ops: AttentionOperands, errors: dict[str, str]) -> Call | None:
    """The contender's call after one eager run with the right result, else None and its error."""
    ops.reference()
    ops.poison()

    def complaint(out: torch.Tensor) -> str | None:
        relative = ops.error(out.reshape(ops.reference().shape))
        if relative < TOLERANCE:
            return None
        return f"wrong result: |out - torch| / |torch| is {relative:.3g}, at most {TOLERANCE}"

    return checked_call(contender, errors, complaint)
