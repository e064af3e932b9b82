"""One split, always the same: decode on some SMs, prompts layer by layer on the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from smkern.latency.predictor import Predictor
from smkern.limits import as_flag
from smkern.policies.admission import Batch, admitted, chunks_of
from smkern.policies.base import BasePolicy
from smkern.policies.check import check_counts
from smkern.policies.decision import Decision
from smkern.policies.layerwise import GROUP_LAYERS, GROUPS_AHEAD, layers_left, split
from smkern.policies.order import TOKEN_US, Order
from smkern.policies.preemption import Turns, preempts
from smkern.policies.pricing import Prices
from smkern.policies.settings import check_splits
from smkern.policies.snapshot import Snapshot, Waiting

MAX_PREFILL_TOKENS = 2048
"""New tokens of a batch of prompts. The last of a batch waits for all of it: with 8,192 a simulated
H200 serves 18.7 requests/s of Azure's conversations at 20 ms TBT, with 2,048 20.2."""


class StaticSplit(BasePolicy):
    """Decode on `decode_sms` SMs while prompts run on all others; requests in their order.

    A batch of prompts runs N layers at a time. With a predictor, N = ceil(T_d * N_T / T_p): the
    layers that take as long as a decode step takes, both beside each other. Without, 4.

    Args:
        decode_sms: SMs of the decode side, a rung of the device; None: the rung that is nearest to
            a quarter of the device.
        predictor: Prices steps and layers, for the size of a group.
        tbt_slo_ms: Nothing follows from it: the split is what it is.
        ttft_slo_ms: First tokens of requests that have no deadline; a batch is preempted only where
            it keeps its own.
        order: In which requests wait: a name of `smkern.policies.ORDERS`, or a function.
        layers: Layers of a group; None: as above.
        steps: Decode steps launched at a time; 1 while a batch is about to join, for it would wait
            until all that are queued are over.
        max_prefill_tokens: New tokens of a batch of prompts; a longer prompt comes in several.
        preempt_shorter_than: Prompts of fewer tokens go before a running batch that has more work
            left; None: none does.
        move: Whether the side that has work takes the whole device while the other has none.
        decode_shares: Whether decode runs on the whole device, around the prompts and beside them,
            while prompts keep to their side.
        join: "polled": each side goes on when its own work is over. "gang": both wait for each
            other.

    Raises:
        ArgumentError: a count below 1, another join, a limit that is none.

    Source: MuxWise section 3.4.2 (N, one level of preemption); DRIFT section 3.3 (gangs); Bullet
        section 4.4 and figure 22 (`decode_shares`: its static splits of the prefill side).

    Example:
        >>> from smkern.policies import Snapshot, StaticSplit, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 1000),), running_kv=(300, 80), rungs=(16, 32), num_sms=132,
        ...     num_layers=36, free_pages=500, page_size=16, max_running=8, max_prefill=4,
        ...     max_tokens=8192,
        ... )
        >>> decision = StaticSplit(32).decide(snapshot)
        >>> decision.rung, decision.prefill, decision.layers
        (32, (7,), 4)
    """

    heeds = ("ttft",)
    splits = "must"
    first = "decode_sms"

    def __init__(
        self,
        decode_sms: int | None = None,
        predictor: Predictor | None = None,
        *,
        tbt_slo_ms: float | None = None,
        ttft_slo_ms: float | None = None,
        order: str | Order = "fcfs",
        layers: int | None = None,
        steps: int = 2,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        preempt_shorter_than: int | None = None,
        move: bool = True,
        decode_shares: bool = False,
        join: Literal["polled", "gang"] = "polled",
    ) -> None:
        check_counts({"decode_sms": decode_sms})
        counts = {
            "layers": layers, "steps": steps, "max_prefill_tokens": max_prefill_tokens,
            "preempt_shorter_than": preempt_shorter_than,
        }  # fmt: skip
        super().__init__(
            predictor, tbt_slo_ms, ttft_slo_ms, order, counts, move=as_flag("move", move),
            decode_shares=as_flag("decode_shares", decode_shares) or None, join=join,
        )  # fmt: skip
        self.decode_sms = decode_sms
        self._layers = layers
        self._steps = steps
        self._max_tokens = max_prefill_tokens
        self._short = preempt_shorter_than
        self._move = move
        self._shares = decode_shares
        self._join: Literal["polled", "gang"] = join
        self._turns = Turns(self._limits)

    def check_device(self, rungs: Sequence[int], num_sms: int) -> None:
        """Raise ArgumentError for what the device does not have: its rung."""
        check_splits("StaticSplit", rungs, self.decode_sms)

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next group of layers, the batch that begins, or neither."""
        running = snapshot.prefill
        if running is None:
            return self._launch(snapshot, admitted(snapshot, self._tokens(snapshot)))
        short = self._shorter(snapshot)
        if short:
            return self._launch(snapshot, short, preempt=True)
        return self._launch(snapshot, ())

    def _launch(self, snapshot: Snapshot, batch: Batch, *, preempt: bool = False) -> Decision:
        """Layers of a batch that begins, or of the one that runs; decode alone without."""
        tokens = self._tokens(snapshot)
        rung = self._rung(snapshot)
        layers = 0
        if batch:
            self._turns.begins(snapshot, batch, preempt=preempt)
            chunks = chunks_of(batch, tokens)
            layers = max(1, self._group(snapshot, chunks, snapshot.num_layers, rung))
        elif snapshot.prefill is not None:
            left = layers_left(snapshot)
            layers = self._group(snapshot, snapshot.prefill.chunks, left, rung)
        # Decode on the whole device, the prompts on their side of the rung.
        shares = self._shares and rung is not None
        return split(
            snapshot,
            None if shares else rung,
            layers=layers,
            batch=batch,
            tokens=tokens if batch else None,
            preempt=preempt,
            steps=self._steps,
            move=self._move,
            join=self._join,
            prefill_rung=rung if shares else "same",
            shared=shares,
        )

    def _rung(self, snapshot: Snapshot) -> int | None:
        """SMs of the decode side; None where the device has no rung."""
        if self.decode_sms is None and snapshot.rungs:
            self.decode_sms = min(snapshot.rungs, key=lambda rung: abs(4 * rung - snapshot.num_sms))
        return self.decode_sms

    def _tokens(self, snapshot: Snapshot) -> int:
        return min(self._max_tokens, snapshot.max_tokens)

    def _shorter(self, snapshot: Snapshot) -> Batch:
        """Short prompts to go before the running batch, with less work than it has left."""
        running = snapshot.prefill
        if self._short is None or running is None or not self._turns.may_preempt(snapshot):
            return ()
        most = min(self._short - 1, self._tokens(snapshot))
        whole_us = TOKEN_US * sum(new for new, _ in running.chunks)
        return preempts(
            snapshot,
            left_us=whole_us * layers_left(snapshot) / snapshot.num_layers,
            deadline_us=self._turns.deadline_us(running),
            cost_us=_work_us,
            tokens=most,
            waiting=(request for request in snapshot.waiting if request.tokens <= most),
        )

    def _group(
        self, snapshot: Snapshot, chunks: Iterable[tuple[int, int]], left: int, rung: int | None
    ) -> int:
        """Layers to launch now, of those that are left."""
        if snapshot.prefill_queued >= GROUPS_AHEAD:
            return 0
        if self._layers is not None:
            return min(self._layers, left)
        if self._predictor is None or not snapshot.batch or rung is None:
            return min(GROUP_LAYERS, left)
        prices = Prices(self._predictor, snapshot)
        decode_sms = snapshot.num_sms if self._shares else rung
        return min(prices.layers_of_a_step(chunks, decode_sms, snapshot.num_sms - rung), left)


def _work_us(batch: Iterable[Waiting]) -> float:
    return TOKEN_US * sum(request.tokens for request in batch)
