"""Prompts layer by layer beside decode steps: what the policies that split a device share."""

from __future__ import annotations

from typing import Literal

from smkern.policies.admission import Batch, ids_of
from smkern.policies.decision import Decision
from smkern.policies.snapshot import Snapshot

GROUP_LAYERS = 4
"""Layers of a group where no predictor says how many."""
GROUPS_AHEAD = 2
"""Groups on the prefill lane: one runs, and the next is there when it ends."""


def layers_left(snapshot: Snapshot) -> int:
    """Layers of the running batch that are not launched; all of the model where none runs."""
    launched = 0 if snapshot.prefill is None else snapshot.prefill.layers_launched
    return snapshot.num_layers - launched


def split(
    snapshot: Snapshot,
    rung: int | None,
    *,
    layers: int,
    batch: Batch = (),
    tokens: int | None = None,
    preempt: bool = False,
    steps: int = 1,
    move: bool = True,
    join: Literal["polled", "gang"] = "polled",
    prefill_rung: int | Literal["same"] | None = "same",
    shared: bool = False,
    reason: str = "",
) -> Decision:
    """Layers of prompts beside decode steps.

    Args:
        snapshot: The moment.
        rung: SMs of the decode side; None: all.
        layers: Layers to launch, of the batch that runs or begins.
        batch, tokens, preempt: What begins, and its new tokens at most.
        steps: Decode steps ahead; 1 where somebody joins soon, who would wait for all of them.
        move: Whether a side that has all the work takes the whole device. Not while somebody
            joins: it would wait for what was launched behind it on all SMs.
        join, prefill_rung, shared, reason: As in a `Decision`.
    """
    joins = snapshot.joining > 0
    if move and not joins and not (snapshot.batch and layers_come(snapshot, layers)):
        rung, prefill_rung, shared = None, "same", False
    left = snapshot.num_layers if batch else layers_left(snapshot)
    ends = layers_come(snapshot, layers) and left <= 2 * layers
    return Decision(
        rung=rung,
        prefill=ids_of(batch),
        chunk_tokens=tokens,
        layers=layers,
        steps=1 if joins or ends else steps,
        join=join,
        preempt=preempt,
        prefill_rung=prefill_rung,
        shared=shared,
        reason=reason,
    )


def layers_come(snapshot: Snapshot, layers: int) -> bool:
    """Whether the prefill side has work after this decision."""
    return layers > 0 or snapshot.prefill is not None
