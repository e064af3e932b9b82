"""Chunked prefill: prompts' chunks and decode rows in one forward on the whole device."""

from __future__ import annotations

from math import inf

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.latency.predictor import Predictor
from smkern.policies.admission import admitted, chunks_of, ids_of
from smkern.policies.check import check_counts
from smkern.policies.decision import Decision
from smkern.policies.search import largest
from smkern.policies.snapshot import PrefillView, Snapshot, Waiting

QUANTUM = 64
"""Tokens that a chunk under a limit grows by; it is never smaller, so that prompts go on even
where the decode rows alone exceed the limit."""


class Chunked:
    """Every forward takes all decode rows and as many tokens of prompts as it may; the default.

    Where nothing decodes, no request waits between two tokens, and a forward takes what the buffers
    hold. Where no prompt waits, `steps` decode graphs of the whole device are launched together.

    Args:
        chunk_tokens: New tokens of prompts in a forward beside decode rows, at most; with a limit,
            the predictor says how many.
        tbt_slo_ms: Limit of the time between two tokens of a request; None: none.
        predictor: Prices a forward; needed with a limit.
        steps: Decode steps launched at a time where no prompt waits.
        ahead: Whether a forward with chunks is launched while the one before it runs, so that the
            device never idles; the decode lane's queue must hold the kernels of two.

    Raises:
        ArgumentError: a count below 1, a limit not above 0, or one without a predictor.

    Source: chunked prefill as in Sarathi-Serve, which the papers compare with; with the largest
        chunk under a limit.

    Example:
        >>> from smkern.policies import Chunked, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     now_us=0.0, trigger="arrival", waiting=(Waiting(7, 0.0, 1000),), prefill=None,
        ...     preempted=None, running_kv=(300, 80), token_age_us=0.0, decode_queued=0,
        ...     prefill_queued=0, rung=None, rungs=(16, 32), num_sms=132, num_layers=36,
        ...     free_pages=500, page_size=16, max_running=8, max_prefill=4, max_tokens=8192,
        ... )
        >>> decision = Chunked(chunk_tokens=512).decide(snapshot)
        >>> decision.rung, decision.prefill, decision.chunk_tokens
        (None, (7,), 512)
    """

    def __init__(
        self,
        chunk_tokens: int = 512,
        tbt_slo_ms: float | None = None,
        predictor: Predictor | None = None,
        *,
        steps: int = 2,
        ahead: bool = True,
    ) -> None:
        check_counts({"chunk_tokens": chunk_tokens, "steps": steps})
        if tbt_slo_ms is not None and not 0 < tbt_slo_ms < inf:
            raise ArgumentError(
                f"tbt_slo_ms={tbt_slo_ms}: give a finite time above 0, or None for none"
            )
        if tbt_slo_ms is not None and predictor is None:
            raise ArgumentError(
                f"tbt_slo_ms={tbt_slo_ms} without a predictor: pass one, for instance "
                "smkern.latency.TablePredictor.load()"
            )
        self._chunk_tokens = chunk_tokens
        self._limit_us = None if tbt_slo_ms is None else 1000.0 * tbt_slo_ms
        self._predictor = predictor
        self._steps = steps
        self._near = 1
        """The last chunk under the limit, in quanta."""
        self._ahead = ahead

    def __repr__(self) -> str:
        limit = "" if self._limit_us is None else f"tbt_slo_ms={self._limit_us / 1000:g}, "
        return (
            f"Chunked(chunk_tokens={self._chunk_tokens}, {limit}steps={self._steps}, "
            f"ahead={self._ahead})"
        )

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next forward."""
        if snapshot.prefill is not None:
            return self._finish(snapshot, snapshot.prefill)
        most = snapshot.max_tokens
        if snapshot.batch and self._limit_us is None:
            most = min(most, self._chunk_tokens)
        waiting = admitted(snapshot, most)
        if not waiting:
            return Decision(steps=self._steps)
        if snapshot.batch and self._limit_us is not None:
            most = self._largest(snapshot, waiting, self._limit_us)
            waiting = admitted(snapshot, most)
        ahead = 2 if self._ahead else 1
        return Decision(prefill=ids_of(waiting), chunk_tokens=most, steps=ahead)

    def _finish(self, snapshot: Snapshot, batch: PrefillView) -> Decision:
        """The layers of a batch that another policy began, in turns with decode steps."""
        left = snapshot.num_layers - batch.layers_launched
        if not left or snapshot.prefill_queued > 1:
            return Decision()
        if not snapshot.batch:
            return Decision(layers=left)
        # A step at a time: the two take turns, and a second step would wait behind the layers.
        return Decision(layers=self._layers_between(snapshot, batch, left))

    def _layers_between(self, snapshot: Snapshot, batch: PrefillView, left: int) -> int:
        """As many layers as fit between two decode steps under the limit, at least one."""
        if self._limit_us is None or self._predictor is None:
            return left
        layers = snapshot.num_layers
        step = Size(
            layers=layers,
            num_layers=layers,
            batch=snapshot.batch,
            total_kv=sum(snapshot.running_kv),
        )
        chunks = tuple(Chunk(*chunk) for chunk in batch.chunks)
        slack = self._limit_us - self._predictor.alone_us(step, snapshot.num_sms)
        layer_us = self._predictor.alone_us(Size(chunks, 1, layers), snapshot.num_sms)
        return max(1, min(left, int(slack / layer_us)))

    def _largest(self, snapshot: Snapshot, waiting: tuple[Waiting, ...], limit_us: float) -> int:
        """The most tokens, a multiple of `QUANTUM`, whose forward the predictor holds under the
        limit; `QUANTUM` where none is."""
        useful = sum(request.tokens for request in waiting)
        most = max(1, min(-(-useful // QUANTUM), snapshot.max_tokens // QUANTUM))
        kv = sum(snapshot.running_kv)

        def fits(count: int) -> bool:
            return self._mixed_us(snapshot, waiting, kv, count * QUANTUM) <= limit_us

        # From forward to forward it changes little, and a prediction costs 25 us.
        count = largest(fits, most, self._near)
        self._near = max(count, self._near) if count == most else count
        return min(count * QUANTUM, snapshot.max_tokens)

    def _mixed_us(
        self, snapshot: Snapshot, waiting: tuple[Waiting, ...], total_kv: int, tokens: int
    ) -> float:
        assert self._predictor is not None
        size = Size(
            chunks=tuple(Chunk(*chunk) for chunk in chunks_of(waiting, tokens)),
            layers=snapshot.num_layers,
            num_layers=snapshot.num_layers,
            head=True,
            batch=snapshot.batch,
            total_kv=total_kv,
        )
        return self._predictor.alone_us(size, snapshot.num_sms)
