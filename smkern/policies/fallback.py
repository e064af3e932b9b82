"""What is done where a policy fails: plain, legal, and something wherever something can be."""

from __future__ import annotations

from smkern.policies.decision import Decision
from smkern.policies.snapshot import Snapshot


def fallback(snapshot: Snapshot) -> Decision:
    """First come, first served on the whole device: a batch that is on its way to its end, then
    chunks beside decode steps."""
    if snapshot.prefill is not None:
        return Decision(layers=snapshot.num_layers - snapshot.prefill.layers_launched)
    ids = tuple(waiting.id for waiting in snapshot.waiting[: snapshot.max_prefill])
    return Decision(prefill=ids)
