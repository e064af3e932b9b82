"""What serving was like: tokens, waits, bubbles, switches, work done a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smkern.runtime.place import LANES, Lane
from smkern.runtime.timeline.bubbles import BubbleMeter, Bubbles
from smkern.runtime.timeline.meters import (
    Distribution,
    Rate,
    RateMeter,
    Samples,
    Switches,
    SwitchMeter,
)
from smkern.runtime.timeline.trace import State

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig
    from smkern.runtime.timeline.timeline import Timeline

COUNTED = 32
"""Tokens of one record: it takes some 10 us to be counted, between two polls."""


@dataclass(frozen=True, slots=True, repr=False)
class Stats:
    """What serving was like so far.

    Attributes:
        now_us: When this was.
        elapsed_us: Since the first request came, to now or to when the last one left.
        requests: Requests that came.
        finished: By reason: "stop", "length", "cancelled", "failed".
        prompt_tokens: Prompt tokens of the requests that came.
        tokens: Tokens that were delivered.
        tokens_per_s: Delivered tokens over `elapsed_us`.
        ttft_us: From a request's arrival to its first token.
        tbt_us: Every gap between two tokens of a request, as they were delivered to the host, the
            first to the second included.
        preemptions: Requests that gave their pages back or were put aside.
        bubbles: Bubbles of both lanes, in both definitions (`smkern.runtime.timeline.bubbles`).
        rates: By lane, FLOPs and bytes of its launches.
        switches: Changes of the split.
        state: What there is to do now.
    """

    now_us: float = 0.0
    elapsed_us: float = 0.0
    requests: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    ttft_us: Distribution = field(default_factory=Distribution)
    tbt_us: Distribution = field(default_factory=Distribution)
    preemptions: int = 0
    bubbles: Bubbles = field(default_factory=Bubbles)
    rates: Mapping[Lane, Rate] = field(default_factory=dict)
    switches: Switches = field(default_factory=Switches)
    state: State = field(default_factory=State)

    def __repr__(self) -> str:
        ended = ", ".join(f"{count} {reason}" for reason, count in self.finished.items())
        return (
            f"Stats({self.tokens:,} tokens in {self.elapsed_us / 1e6:.3f} s, "
            f"{self.tokens_per_s:,.0f} a second; {self.requests} requests, finished: "
            f"{ended or 'none'}; TTFT {_ms(self.ttft_us)}; TBT {_ms(self.tbt_us)}; "
            f"{self.bubble_ratio:.1%} bubbles, {self.switches.count} switches, "
            f"{self.preemptions} preemptions)"
        )

    @property
    def bubble_ratio(self) -> float:
        """Share of the time while work existed with no kernel, mean of the lanes."""
        return self.bubbles.ratio

    @property
    def muxwise_bubble_ratio(self) -> float:
        """Share of all time with no kernel, mean of the lanes."""
        return self.bubbles.muxwise_ratio


def _ms(us: Distribution) -> str:
    return f"p50 {us.p50 / 1e3:.2f} ms, p99 {us.p99 / 1e3:.2f} ms" if us.count else "none"


class StatsMeter:
    """Counts while a `Multiplexer` serves.

    Recording appends a tuple to the timeline's; counting is done as that is settled, or by `stats`.

    Args:
        timeline: Its launches and decisions are counted from now on.
        config: The model, for FLOPs and bytes; None: none are counted.

    Example:
        >>> from smkern.runtime.timeline.timeline import Timeline
        >>> meter = StatsMeter(Timeline(132))
        >>> meter.arrived(0, 0.0, prompt_tokens=100)
        >>> meter.delivered([0], 40_000.0)
        >>> meter.delivered([0], 52_000.0)
        >>> meter.stats().tbt_us.max
        12000.0
    """

    def __init__(self, timeline: Timeline, *, config: ModelConfig | None = None) -> None:
        self._timeline = timeline
        self._bubbles = BubbleMeter()
        self._rates = RateMeter(config)
        self._switches = SwitchMeter()
        for reader in (self._bubbles, self._rates, self._switches):
            timeline.attach(reader)
        self._arrived_us: dict[int, float] = {}  # of requests without a token
        self._token_us: dict[int, float] = {}  # the last one's, of requests that have some
        self._ttft = Samples()
        self._tbt = Samples()
        self._first_us: float | None = None
        self._last_us = 0.0
        self._requests = 0
        self._prompt_tokens = 0
        self._tokens = 0
        self._present: set[int] = set()
        self._finished: dict[str, int] = {}

    # Recording: in the serving loop.

    def arrived(self, id: int, at_us: float, *, prompt_tokens: int = 0) -> None:
        """A request came."""
        self._present.add(id)
        self._timeline.later(self._arrived, id, at_us, prompt_tokens)

    def delivered(self, ids: Sequence[int], at_us: float) -> None:
        """A token of each of these requests was handed out; an id twice: two tokens."""
        parts = [(ids[i : i + COUNTED], at_us) for i in range(0, len(ids), COUNTED)]
        self._timeline.later_each(self._delivered, parts)

    def finished(self, id: int, at_us: float, reason: str) -> None:
        """A request left: "stop", "length", "cancelled" or "failed"; ignored if it never came."""
        if id not in self._present:
            return
        self._timeline.later(self._leave, id, at_us, reason)
        self._present.discard(id)
        if not self._present:
            # With no requests no policy is asked, so only this says that the lanes have no work.
            self._timeline.state(at_us, decoding=0)

    # Reading.

    def stats(self, now_us: float | None = None, *, preemptions: int = 0) -> Stats:
        """So far.

        Args:
            now_us: The clock; None: the latest time recorded.
            preemptions: Requests that gave way, as the caller has counted them.
        """
        self._timeline.settle()
        now_us = max(self._last_us, now_us or 0.0)
        end_us = now_us if self._present else self._last_us
        elapsed_us = 0.0 if self._first_us is None else end_us - self._first_us
        bubbles = self._bubbles.bubbles()
        busy = {"decode": bubbles.decode.busy_us, "prefill": bubbles.prefill.busy_us}
        return Stats(
            now_us=now_us,
            elapsed_us=elapsed_us,
            requests=self._requests,
            finished=dict(self._finished),
            prompt_tokens=self._prompt_tokens,
            tokens=self._tokens,
            tokens_per_s=self._tokens / elapsed_us * 1e6 if elapsed_us else 0.0,
            ttft_us=self._ttft.distribution(),
            tbt_us=self._tbt.distribution(),
            preemptions=preemptions,
            bubbles=bubbles,
            rates={lane: self._rates.rate(lane, busy[lane]) for lane in LANES},
            switches=self._switches.switches(),
            state=self._timeline.latest_state,
        )

    def _arrived(self, id: int, at_us: float, prompt_tokens: int) -> None:
        self._requests += 1
        self._prompt_tokens += prompt_tokens
        self._arrived_us[id] = at_us
        self._first_us = at_us if self._first_us is None else min(self._first_us, at_us)
        self._last_us = max(self._last_us, at_us)

    def _delivered(self, ids: Sequence[int], at_us: float) -> None:
        self._last_us = max(self._last_us, at_us)
        self._tokens += len(ids)
        token_us, add = self._token_us, self._tbt.add
        for id in ids:
            before_us = token_us.get(id)
            if before_us is not None:
                add(at_us - before_us)
            elif (arrived_us := self._arrived_us.pop(id, None)) is not None:
                self._ttft.add(at_us - arrived_us)
            token_us[id] = at_us

    def _leave(self, id: int, at_us: float, reason: str) -> None:
        self._last_us = max(self._last_us, at_us)
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self._arrived_us.pop(id, None)
        self._token_us.pop(id, None)
