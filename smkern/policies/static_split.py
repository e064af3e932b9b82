"""One split, always the same: decode on some SMs, prompts layer by layer on the others."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Literal

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.latency.predictor import Predictor
from smkern.policies.admission import admitted, chunks_of, ids_of
from smkern.policies.check import JOINS, check_counts
from smkern.policies.decision import Decision
from smkern.policies.snapshot import PrefillView, Snapshot, Waiting

GROUP_LAYERS = 4
"""Layers of a group where no predictor says how many."""
GROUPS_AHEAD = 2
"""Groups on the prefill lane: one runs, and the next is there when it ends."""

Batch = tuple[Waiting, ...]


class StaticSplit:
    """Decode on `decode_sms` SMs while prompts run on all others; requests in their order.

    A batch of prompts runs N layers at a time. With a predictor, N = ceil(T_d * N_T / T_p): the
    layers that take as long as a decode step takes, both beside each other. Without, 4.

    A short prompt may go before a long one that runs: the long one goes on by a group at least
    before the next may, so it ends whatever comes.

    Args:
        decode_sms: SMs of the decode side, a rung of the device.
        layers: Layers of a group; None: as above.
        steps: Decode steps launched at a time; 1 while a batch is about to join, for it would wait
            until all that are queued are over.
        max_prefill_tokens: New tokens of a batch of prompts; a longer prompt comes in several.
        preempt_shorter_than: Prompts of fewer tokens go before a running batch that has more work
            left; None: none does.
        move: Whether the side that has work takes the whole device while the other has none.
        join: "polled": each side goes on when its own work is over. "gang": both wait for each
            other.
        predictor: Prices steps and layers, for the size of a group.

    Raises:
        ArgumentError: a count below 1, or another join.

    Source: MuxWise section 3.4.2 (N, one level of preemption); DRIFT section 3.3 (gangs).

    Example:
        >>> from smkern.policies import StaticSplit, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     now_us=0.0, trigger="arrival", waiting=(Waiting(7, 0.0, 1000),), prefill=None,
        ...     preempted=None, running_kv=(300, 80), token_age_us=0.0, decode_queued=0,
        ...     prefill_queued=0, rung=None, rungs=(16, 32), num_sms=132, num_layers=36,
        ...     free_pages=500, page_size=16, max_running=8, max_prefill=4, max_tokens=8192,
        ... )
        >>> decision = StaticSplit(32).decide(snapshot)
        >>> decision.rung, decision.prefill, decision.layers
        (32, (7,), 4)
    """

    def __init__(
        self,
        decode_sms: int,
        *,
        layers: int | None = None,
        steps: int = 2,
        max_prefill_tokens: int = 8192,
        preempt_shorter_than: int | None = None,
        move: bool = True,
        join: Literal["polled", "gang"] = "polled",
        predictor: Predictor | None = None,
    ) -> None:
        counts = {
            "decode_sms": decode_sms,
            "layers": layers,
            "steps": steps,
            "max_prefill_tokens": max_prefill_tokens,
            "preempt_shorter_than": preempt_shorter_than,
        }
        check_counts(counts)
        if join not in JOINS:
            raise ArgumentError(f"join={join!r}: there is {' and '.join(map(repr, JOINS))}")
        self._decode_sms = decode_sms
        self._layers = layers
        self._steps = steps
        self._max_tokens = max_prefill_tokens
        self._short = preempt_shorter_than
        self._move = move
        self._join: Literal["polled", "gang"] = join
        self._predictor = predictor
        self._stopped: tuple[float, int] | None = None
        """The batch that was preempted last (when it began), and its layers then."""

    def __repr__(self) -> str:
        given = {
            "layers": self._layers,
            "steps": self._steps,
            "max_prefill_tokens": self._max_tokens,
            "preempt_shorter_than": self._short,
            "move": self._move,
            "join": self._join,
        }
        words = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return f"StaticSplit({', '.join([str(self._decode_sms), *words])})"

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next group of layers, the batch that begins, or neither."""
        if snapshot.prefill is None:
            return self._begin(snapshot, admitted(snapshot, self._tokens(snapshot)))
        short = self._shorter(snapshot, snapshot.prefill)
        if short:
            self._stopped = (snapshot.prefill.started_us, snapshot.prefill.layers_launched)
            return self._begin(snapshot, short, preempt=True)
        left = snapshot.num_layers - snapshot.prefill.layers_launched
        group = self._group(snapshot, snapshot.prefill.chunks, left)
        return self._decision(snapshot, layers=group)

    def _begin(self, snapshot: Snapshot, batch: Batch, *, preempt: bool = False) -> Decision:
        """A batch and its first layers; decode alone where it has none."""
        if not batch:
            rung = None if self._move else self._decode_sms
            steps = 1 if self._decodes_soon(snapshot) else self._steps
            return Decision(rung, steps=steps, join=self._join)
        tokens = self._tokens(snapshot)
        group = self._group(snapshot, chunks_of(batch, tokens), snapshot.num_layers)
        return self._decision(
            snapshot, layers=max(group, 1), batch=batch, tokens=tokens, preempt=preempt
        )

    def _decision(
        self,
        snapshot: Snapshot,
        *,
        layers: int,
        batch: Batch = (),
        tokens: int | None = None,
        preempt: bool = False,
    ) -> Decision:
        soon = self._decodes_soon(snapshot)
        whole = self._move and not snapshot.batch and not soon
        launched = 0 if batch or snapshot.prefill is None else snapshot.prefill.layers_launched
        # A request that joins waits for queued steps: none ahead from a group before the end on.
        soon = soon or launched + 2 * layers >= snapshot.num_layers
        return Decision(
            rung=None if whole else self._decode_sms,
            prefill=ids_of(batch),
            chunk_tokens=tokens,
            layers=layers,
            steps=1 if soon else self._steps,
            join=self._join,
            preempt=preempt,
        )

    def _decodes_soon(self, snapshot: Snapshot) -> bool:
        """Whether the last layers of a batch are on their way: its requests decode when they are
        over, and would wait for layers that were launched behind them on the whole device."""
        if not snapshot.prefill_queued:
            return False
        running = snapshot.prefill
        # Where a batch has preempted this one, and none of this one's layers came since.
        return running is None or self._stopped == (running.started_us, running.layers_launched)

    def _tokens(self, snapshot: Snapshot) -> int:
        return min(self._max_tokens, snapshot.max_tokens)

    def _shorter(self, snapshot: Snapshot, running: PrefillView) -> Batch:
        """Short prompts to go before the running batch, with less work than it has left."""
        if self._short is None or snapshot.preempted is not None:
            return ()
        if self._stopped == (running.started_us, running.layers_launched):
            return ()
        layers = snapshot.num_layers
        work = (layers - running.layers_launched) * sum(new for new, _ in running.chunks)
        most = min(self._short - 1, self._tokens(snapshot))
        short = [request for request in snapshot.waiting if request.tokens <= most]
        chosen: list[Waiting] = []
        for request in admitted(snapshot, most, short):
            work -= layers * request.tokens
            if work <= 0:
                break
            chosen.append(request)
        return tuple(chosen)

    def _group(self, snapshot: Snapshot, chunks: Iterable[tuple[int, int]], left: int) -> int:
        """Layers to launch now, of those that are left."""
        if snapshot.prefill_queued >= GROUPS_AHEAD:
            return 0
        if self._layers is not None:
            return min(self._layers, left)
        if self._predictor is None or not snapshot.batch:
            return min(GROUP_LAYERS, left)
        return min(self._layers_of_a_step(snapshot, chunks, self._predictor), left)

    def _layers_of_a_step(
        self, snapshot: Snapshot, chunks: Iterable[tuple[int, int]], predictor: Predictor
    ) -> int:
        """ceil(T_d * N_T / T_p)."""
        layers, decode_sms = snapshot.num_layers, self._decode_sms
        prefill_sms = snapshot.num_sms - decode_sms
        step = Size(
            layers=layers,
            num_layers=layers,
            batch=snapshot.batch,
            total_kv=sum(snapshot.running_kv),
        )
        prompts = Size(tuple(Chunk(*chunk) for chunk in chunks), layers, layers)
        step_us = predictor.alone_us(step, decode_sms)
        step_us *= predictor.slowdown(step, decode_sms, prompts, prefill_sms)
        prompts_us = predictor.alone_us(prompts, prefill_sms)
        prompts_us *= predictor.slowdown(prompts, prefill_sms, step, decode_sms)
        return max(1, ceil(step_us * layers / prompts_us))
