"""Ours: at every decision the way by which prompts go fastest while tokens come in time."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import get_args

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Corrected, Size
from smkern.latency.predictor import Predictor
from smkern.limits import as_float
from smkern.policies.admission import Batch, admitted, chunks_of, ids_of, taken
from smkern.policies.base import BasePolicy
from smkern.policies.chunk_size import ChunkSize
from smkern.policies.decision import Decision
from smkern.policies.lateness import Lateness
from smkern.policies.layerwise import GROUP_LAYERS, GROUPS_AHEAD, layers_left, split
from smkern.policies.order import Order
from smkern.policies.pricing import Chunks, Prices
from smkern.policies.saturation import Saturation
from smkern.policies.search import largest, least
from smkern.policies.snapshot import Snapshot
from smkern.policies.way import Mode, Way

PREFILL_TOKENS, BATCH_US = 2048, 64e3
"""New tokens of a batch of prompts beside decode steps, at least: the last of it waits for all of
it. It has more, a power of two, where the whole device computes them in such a time: 4,096 of
Qwen3-30B-A3B and of 8B in fp8, whose batches end too often otherwise. In fp8, an H200 simulated,
twice as many gave 7% on Mooncake within 30 ms, 1 to 3% on Azure's conversations and -1 to 2% on
its code; four times as many 8, 4 to 6, and -2 to 6%, but -4% on Mooncake within 15 ms; in bf16
twice as many gave -1 to 1%, on Mooncake -7%."""
LATE = 0.008
"""Share of tokens that may be late: p99 of all gaps stays under the limit, with a margin."""
FIRST_AIMS = {"mixed": 0.95, "split": 0.87, "turns": 0.95}
"""Share of the limit that steps are planned for before any was seen: on an H200 one mixed forward
in a hundred takes 6% longer than predicted once the factor of its kind is known, and one step
beside prompts in ten 8%. Late steps of hundreds of rows cost more than an aim that begins low."""
RATE = 0.1
"""Part of the way that launches move the factor of their kind. A chip at its power limit swings by
2% around what it does for long, and what one mixed forward was off by the next is by 0.9 of it, the
one eight steps later by 0.1."""
CHANGE_US = 40e3
"""What a change between chunks and a split costs prompts, which pause, and tokens, which come late:
it is made once staying has cost more. Beside 64 rows within 15 ms, simulated, 18.2 prompt tokens/ms
for 17.5 by chunks and splits that count 0.88 of their rate where they are not the present way; with
12 ms 18.1."""
FAR_SLOWER = 0.6
"""A chunk of at most this share of the rate of layers between steps gives way to them. A few tokens
meet most experts: of Qwen3-30B-A3B, 30 ms, an H100 simulated, Azure's code 13.7 to 14.4 requests/s,
conversation 5.7 to 6.1 (0.75: half of it, as changes cost more); an H200's as before."""
MOST_LAYERS, FIRST_LAYERS, LAST_LAYERS = 3, 1, 2
"""Layers of a group beside decode steps: the host hands out no token while it launches them. It
takes as long as for three to send what comes with the first, and for the head behind the last."""
HOSTS = 1.25
"""A launch of at most so many times its host's time waited for that: it tells nothing of a chip."""
MODES: tuple[Mode, ...] = get_args(Mode)
ROOM_TO_GROW = 0.95
"""Share of the limit that a decode step may take when requests are admitted: its rows grow."""


class Adaptive(BasePolicy):
    """Chunks or a split: whichever computes most prompt tokens a time under the limit.

    When a batch of prompts can begin, three ways are priced: the largest chunk in the next decode
    forward; a batch by layers on the SMs that the smallest split under the limit leaves; its layers
    between decode steps, which a chunk gives way to where it is far slower, or takes more than its
    time, as the least one fills another tile of every product, and too many tokens came late. The
    fastest that keeps tokens in time is taken, from chunks to a split or back once staying has cost
    as much as a change. A batch on its way moves its split with every decode step, as rows come and
    keys grow; where none fits any more its layers take turns with steps.

    What is late is counted as it was handed out (`Lateness`), up to `late` of all tokens is
    spent, and the aim of each way follows its own steps, so predictions that are off by some
    percent, or a chip whose clock falls, cost speed rather than late tokens. A request is admitted
    where the decode step with it keeps the limit on the whole device.

    Args:
        predictor: Prices launches, alone and beside each other.
        tbt_slo_ms: Limit of the time between two tokens, for p99 of all.
        ttft_slo_ms: First token of requests that have no deadline, for the order.
        order: In which requests wait.
        max_prefill_tokens: New tokens of a batch beside decode steps. None: 2,048, or as many as
            the whole device computes in 64 ms, see `Saturation`.
        late: Share of tokens that may be late, 0 or more and below 1.
        modes: The ways that may be taken.

    Raises:
        ArgumentError: no predictor or limit, or settings that cannot be.

    Source: ours; rungs by need as in MuxWise section 3.4, mixed forwards where they keep the limit
        as in DuetServe section 4.2.

    Example:
        >>> from smkern.latency import TablePredictor
        >>> from smkern.policies import Adaptive, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     trigger="decode", waiting=(Waiting(7, 0.0, 2000, 8000),), running_kv=(2048,) * 4,
        ...     rungs=(16, 32, 48), num_sms=132, num_layers=36, free_pages=500, page_size=16,
        ...     max_running=96, max_prefill=4, max_tokens=8192,
        ... )
        >>> predictor = TablePredictor.load("qwen3-8b")
        >>> [Adaptive(predictor, tbt_slo_ms=limit).decide(snapshot).rung for limit in (10, 20)]
        [32, None]
    """

    heeds = ("tbt",)
    needs_limit = True
    splits = "may"
    decodes_alone_steadily = False

    def __init__(
        self,
        predictor: Predictor | None = None,
        *,
        tbt_slo_ms: float | None = None,
        ttft_slo_ms: float | None = None,
        order: str | Order = "slack",
        max_prefill_tokens: int | None = None,
        late: float = LATE,
        modes: tuple[Mode, ...] = MODES,
    ) -> None:
        if not isinstance(modes, tuple | list) or not modes or not set(modes) <= set(MODES):
            raise ArgumentError(f"modes={modes!r}: give one or more of {MODES}")
        if not 0 <= as_float("late", late) < 1:
            raise ArgumentError(f"late={late}: give a share of tokens, 0 or more, under 1")
        super().__init__(
            predictor, tbt_slo_ms, ttft_slo_ms, order, {"max_prefill_tokens": max_prefill_tokens},
            late=None if late == LATE else late,
            modes=None if set(modes) == set(MODES) else tuple(modes),
        )  # fmt: skip
        self._saturation = Saturation(self._predictor)
        self._predictor = Corrected(self._predictor, rate=RATE)
        self.lateness = Lateness(self._limits.tbt_us, late, FIRST_AIMS)
        self._limit_us = self._limits.tbt_us
        self._max_prefill_tokens = max_prefill_tokens
        self._modes = modes
        self._size = ChunkSize()
        self._nearest = 0
        """The rung that a split took last."""
        self._mode: Mode = "mixed"
        self._lost_us = CHANGE_US
        """What prompts lost since the last change, as they were not computed the other way."""
        self._batch: tuple[Size, Size, float] | None = None
        """Prompts whose layers run beside decode, these steps, and since when."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next step, with as many prompt tokens as may go with it."""
        self.lateness.see(snapshot.ended, snapshot.num_sms)
        self._learn(snapshot)
        prices = Prices(self._predictor, snapshot)
        if snapshot.prefill is not None:
            return self._go_on(snapshot, prices, snapshot.prefill.chunks)
        batch = self._admitted(snapshot, prices)
        if not batch:
            self._lost_us = CHANGE_US  # whatever comes next changes nothing
            return self._alone(snapshot, "decode alone")
        if not snapshot.batch:
            if snapshot.joining and snapshot.prefill_queued:
                return Decision(reason="joining first")
            # Who comes meanwhile waits for all of it.
            tokens = self._batch_tokens(snapshot)
            return Decision(
                prefill=ids_of(taken(batch, tokens)), chunk_tokens=tokens, reason="prompts alone"
            )
        return self._begin(snapshot, prices, batch)

    def _learn(self, snapshot: Snapshot) -> None:
        """What ended corrects the predictor, where it is known what ran beside it all the time."""
        if snapshot.prefill is None:
            self._batch = None
        total, batch = snapshot.num_sms, self._batch
        for launch in snapshot.ended:
            size, num_sms, us = launch.size, launch.num_sms, launch.ended_us - launch.began_us
            if us <= HOSTS * launch.host_us:
                continue
            if num_sms == total:
                self._predictor.observe(size, num_sms, us)
            elif batch is not None and launch.began_us > batch[2]:
                prompts, step, _ = batch
                beside = step if size.chunks else prompts
                self._predictor.observe(size, num_sms, us, beside, total - num_sms)

    def _admitted(self, snapshot: Snapshot, prices: Prices) -> Batch:
        """Requests that may begin: those whose tokens the device could draw in time, too."""
        batch = admitted(snapshot, snapshot.max_tokens)
        if not batch or not snapshot.batch:
            return batch
        most_us = ROOM_TO_GROW * self._limit_us
        total = snapshot.num_sms

        def fits(count: int) -> bool:
            keys = sum(request.tokens + request.cached for request in batch[:count])
            return prices.grown_step_us(count, keys, total) <= most_us

        if fits(len(batch)):
            return batch
        if not fits(1):
            return ()
        return batch[: largest(fits, len(batch), 1)]

    def _alone(self, snapshot: Snapshot, why: str) -> Decision:
        """Decode steps, on their side as long as the last layers run on the other: on the whole
        device they would wait for these."""
        steps = 1 if snapshot.joining or snapshot.waiting else 2
        rung = snapshot.rung if snapshot.prefill_queued else None
        return Decision(rung, steps=steps, reason=why)

    def _begin(self, snapshot: Snapshot, prices: Prices, batch: Batch) -> Decision:
        """The fastest way that keeps tokens in time; decode alone where none does."""
        tokens = self._batch_tokens(snapshot)
        chunks = tuple(chunks_of(batch, tokens))
        mixed = self._mixed(snapshot, prices, batch) if "mixed" in self._modes else None
        is_long = mixed is not None and mixed.step_us > self._aim_us("mixed")
        turns = None
        if "turns" in self._modes and (
            mixed is None or is_long or self._is_slow(snapshot, prices, mixed.rate)
        ):
            turns = self._turns(snapshot, prices, chunks)
        if mixed is not None and turns is not None:
            if not is_long:
                turns = turns if mixed.rate <= FAR_SLOWER * turns.rate else None
            elif self.lateness.is_overdrawn:
                mixed = None  # it is such chunks that come late
        plans = [mixed, turns]
        if "split" in self._modes:
            plans.append(self._split(snapshot, prices, chunks))
        plan = self._fastest(snapshot, [x for x in plans if x is not None])
        if plan is None:
            why = f"decode alone: {len(batch)} prompts would make tokens late"
            return self._alone(snapshot, why)
        if plan.mode == "mixed" and snapshot.prefill_queued:
            self._lost_us = CHANGE_US  # the change is still to be made
            return self._alone(snapshot, "decode alone: a chunk comes behind the last layers")
        self._mode = plan.mode
        if plan.mode == "split":
            layers = snapshot.num_layers
            prompts = Size(tuple([Chunk(*chunk) for chunk in chunks]), layers, layers)
            self._batch = prompts, prices.step, snapshot.now_us
        why = f"{plan.mode}: step {plan.step_us / 1000:.1f} ms, {1000 * plan.rate:.1f} tokens/ms"
        if plan.mode == "mixed":
            chunk, gone_us = plan.chunk, self._gone_us(snapshot)
            if gone_us:
                aim_us = self._aim_us("mixed") - gone_us
                chunk, us = self._size.largest(snapshot, prices, batch, chunk, aim_us)
                if us > self._limit_us - gone_us:
                    return self._alone(snapshot, "decode alone: a chunk would be late")
            ids = ids_of(taken(batch, chunk))
            return Decision(prefill=ids, chunk_tokens=chunk, steps=2, reason=why)
        ids = ids_of(batch[: len(chunks)])
        layers = self._layers(snapshot, prices, chunks, plan.rung)
        return Decision(
            rung=plan.rung,
            prefill=ids,
            chunk_tokens=tokens,
            layers=max(1, layers),
            steps=1 if snapshot.joining or plan.mode == "turns" else 2,
            reason=why,
        )

    def _fastest(self, snapshot: Snapshot, plans: Sequence[Way]) -> Way | None:
        """The fastest way; of those on the other side once staying has cost as much as a change."""
        is_whole, rate = snapshot.rung is None, attrgetter("rate")
        stays = max((x for x in plans if (x.rung is None) == is_whole), key=rate, default=None)
        other = max((x for x in plans if (x.rung is None) != is_whole), key=rate, default=None)
        if stays is None or other is None:
            return stays or other
        lost_us = self._lost_us + stays.us * (other.rate / stays.rate - 1.0)
        changes = lost_us > CHANGE_US
        self._lost_us = 0.0 if changes else max(0.0, lost_us)
        return other if changes else stays

    def _batch_tokens(self, snapshot: Snapshot) -> int:
        """New tokens of a batch of prompts."""
        tokens = self._max_prefill_tokens
        if tokens is None:
            layers, total = snapshot.num_layers, snapshot.num_sms
            tokens = max(PREFILL_TOKENS, self._saturation.tokens_within(BATCH_US, layers, total))
        return min(tokens, snapshot.max_tokens)

    def _go_on(self, snapshot: Snapshot, prices: Prices, chunks: Chunks) -> Decision:
        """The next layers of the batch on its way."""
        left = layers_left(snapshot)
        if not snapshot.batch:
            few = snapshot.prefill_queued >= GROUPS_AHEAD
            layers = 0 if few else min(left, GROUP_LAYERS)
            return Decision(layers=layers, reason="prompts alone")
        rung = None
        if self._mode == "split":
            rung = self._rung(snapshot, prices, chunks, self._gone_us(snapshot))
        layers = min(left, self._layers(snapshot, prices, chunks, rung))
        if rung is None:
            return Decision(layers=layers, reason="turns")
        step_us = prices.step_beside_us(rung, chunks, snapshot.num_sms - rung)
        why = f"split: step {step_us / 1000:.1f} ms"
        return split(snapshot, rung, layers=layers, steps=2, move=False, reason=why)

    def _aim_us(self, mode: Mode) -> float:
        """What a step may take."""
        return self.lateness.aims[mode] * self._limit_us

    def _gone_us(self, snapshot: Snapshot) -> float:
        """What of the next step's time has gone by, where none runs."""
        return 0.0 if snapshot.decode_queued else snapshot.token_age_us

    def _layers(self, snapshot: Snapshot, prices: Prices, chunks: Chunks, rung: int | None) -> int:
        """Layers of the next group: a decode step's time beside it, or what a turn holds."""
        if rung is not None:
            if snapshot.prefill_queued >= GROUPS_AHEAD:
                return 0
            left = layers_left(snapshot)
            if left == snapshot.num_layers:
                return FIRST_LAYERS
            layers = prices.layers_of_a_step(chunks, rung, snapshot.num_sms - rung)
            return min(layers, MOST_LAYERS, left if left <= LAST_LAYERS else left - LAST_LAYERS)
        if snapshot.prefill_queued:
            return 0
        aim_us = self._aim_us("turns") - self._gone_us(snapshot)
        return min(prices.layers_within(chunks, aim_us), snapshot.num_layers)

    def _mixed(self, snapshot: Snapshot, prices: Prices, batch: Batch) -> Way | None:
        aim_us = self._aim_us("mixed")
        most = snapshot.max_tokens
        tokens, us = self._size.largest(snapshot, prices, batch, most, aim_us)
        useful = sum(request.tokens for request in batch)
        # The least chunk may take all of the limit: many rows alone pass the aim, and then nothing
        # would begin until some of them end.
        late = snapshot.batch if us > self._limit_us else 0
        if not self.lateness.allows(late, snapshot.batch):
            return None
        rate = min(useful, tokens) / us
        return Way("mixed", rate, None, us, us, chunk=tokens)

    def _is_slow(self, snapshot: Snapshot, prices: Prices, rate: float) -> bool:
        """Whether chunks at a rate may be far slower than layers between steps, which are priced
        then."""
        layers, total = snapshot.num_layers, snapshot.num_sms
        left = 1.0 - prices.step_us(total) / self._aim_us("turns")
        return rate * self._saturation.token_us(layers, total) <= FAR_SLOWER * left

    def _split(self, snapshot: Snapshot, prices: Prices, chunks: Chunks) -> Way | None:
        """A batch by layers beside decode steps."""
        rung, total = self._rung(snapshot, prices, chunks), snapshot.num_sms
        if rung is None:
            return None
        step_us = prices.step_beside_us(rung, chunks, total - rung)
        us = prices.prompts_beside_us(chunks, total - rung, rung)
        is_cut = chunks[-1][0] < snapshot.waiting[len(chunks) - 1].tokens
        if len(chunks) == len(snapshot.waiting) and not is_cut:
            us = max(us, step_us)  # with nothing behind them, the step keeps its side to its end
        return Way("split", sum(new for new, _ in chunks) / us, rung, step_us, us)

    def _turns(self, snapshot: Snapshot, prices: Prices, chunks: Chunks) -> Way | None:
        """A batch by layers between decode steps, on the whole device."""
        if snapshot.prefill_queued:
            return None
        layers, total = self._layers(snapshot, prices, chunks, None), snapshot.num_sms
        share = layers / snapshot.num_layers
        us = prices.step_us(total) + share * prices.prompts_us(chunks, total)
        if us > self._aim_us("turns") - self._gone_us(snapshot):
            return None
        return Way("turns", share * sum(new for new, _ in chunks) / us, None, us, us)

    def _rung(
        self, snapshot: Snapshot, prices: Prices, chunks: Chunks, gone_us: float = 0.0
    ) -> int | None:
        """The smallest decode side whose step beside prompts is in time, of which so much has gone
        by; None: none is."""
        rungs, total = snapshot.rungs, snapshot.num_sms
        most_us = self._aim_us("split") - gone_us

        def fits(index: int) -> bool:
            rung = rungs[index]
            if prices.step_us(rung) > most_us:
                return False
            return prices.step_beside_us(rung, chunks, total - rung) <= most_us

        if not rungs:
            return None
        found = least(fits, len(rungs), min(self._nearest, len(rungs) - 1))
        if found == len(rungs):
            return None
        self._nearest = found
        return rungs[found]
