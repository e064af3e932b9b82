"""How many tokens came late, as a policy sees it by the launches that ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from smkern.policies.snapshot import Ended

WINDOW = 20_000.0
"""Tokens over which lateness is counted; older ones fade."""
GIVEN = 2_000.0
"""Tokens in time that are counted before any was seen, so that a first late one does not spend all.
With half a window 400 requests for Azure's code, 10,000 tokens in all, had 1.1% of them late."""
NEAR = 0.8
"""Steps of at least this share of what they are planned for say how well the limit is kept."""
BACK_OFF = 0.005
"""What a late step takes from the aim where half of what may be late is late, in proportion else:
with all of it 64 rows beside prompts have as many prompt tokens, simulated within 15 to 30 ms."""
MOST = 3.0
"""At most so many times as much. With 1 chunks of Qwen3-30B-A3B, whose first aim is too high for
how they vary in simulations, had spent twice what may be late before it was low enough."""
GIVE_BACK = {"mixed": BACK_OFF / 150, "split": BACK_OFF / 300, "turns": BACK_OFF / 300}
"""What one that is on time gives back."""
LEAST_AIM, MOST_AIM = 0.8, 0.998
OVERDRAWN = 5.0
"""Of what may be late: with more, what is planned for longer than its aim is not taken any more."""
PAUSE = 0.1
"""Share of the limit by which tokens come after their step has ended where the host paused: what it
launches meanwhile takes less. No shorter step would have helped. Simulated, 8B on an H200 beside
prompts, a host that pauses for 16 to 40 ms twice or three times a second computes 14.5 and 21.6
tokens/ms within 15 and 20 ms, where aims that fell for it left 11.3 and 20.0."""
OWN = 0.5
"""Part of what may be late that a way may always risk of its own tokens: after a pause of the host,
which spends all of it, the other way would be taken for seconds."""


class Lateness:
    """The gaps between tokens, as they were handed out, and what follows from them.

    A row's gap is from one decode launch to the next one, also that of a request that joins from a
    split, whose first token is handed out when the step that runs has ended. An aim is the share of
    the limit that a step may be planned for: it falls where steps turn out longer than predicted,
    and so takes in a chip's clock, but not where the host paused.

    Args:
        limit_us: Limit of a gap.
        allowed: Share of late gaps that is wanted at most.
        aims: What steps of each mode are planned for at first, as a share of the limit.

    Attributes:
        aims: The aim of steps with prompts in the same forward ("mixed"), beside prompts ("split")
            and of others ("turns").
    """

    def __init__(self, limit_us: float, allowed: float, aims: Mapping[str, float]) -> None:
        self.aims = dict(aims)
        self._limit_us = limit_us
        self._allowed = allowed
        self._gaps, self._late, self._paused = GIVEN, 0.0, 0.0
        self._last: Ended | None = None
        self._joined: list[Ended] = []

    @property
    def share(self) -> float:
        """Late gaps of the last ones."""
        return self._late / self._gaps

    @property
    def is_overdrawn(self) -> bool:
        """Whether much more came late than may, but for the host's pauses."""
        return self._late - self._paused > OVERDRAWN * self._allowed * self._gaps

    def allows(self, late: float, gaps: float) -> bool:
        """Whether so many more late gaps among so many may be risked; none always may."""
        own = OWN * self._allowed * gaps
        return late <= max(own, self._allowed * (self._gaps + gaps) - self._late)

    def see(self, ended: Iterable[Ended], num_sms: int) -> None:
        """Launches that ended since the last look.

        Args:
            ended: They, in the order of their ends.
            num_sms: SMs of the whole device.
        """
        for launch in ended:
            if launch.lane == "prefill":
                if launch.size.head:
                    self._joined.append(launch)
                continue
            self._step(launch, num_sms)
            self._last = launch

    def _step(self, launch: Ended, num_sms: int) -> None:
        size = launch.size
        come = [prompts for prompts in self._joined if prompts.ended_us <= launch.began_us]
        self._joined = [prompts for prompts in self._joined if prompts.ended_us > launch.began_us]
        for prompts in come:
            first_us = max(prompts.seen_us, self._last.seen_us if self._last else 0.0)
            self._count(len(prompts.size.chunks), launch.seen_us - first_us)
        going_on = size.batch - sum(len(prompts.size.chunks) for prompts in come)
        if going_on <= 0 or self._last is None:
            return
        gap_us = launch.seen_us - self._last.seen_us
        period_us = launch.ended_us - self._last.ended_us
        self._count(going_on, gap_us)
        if gap_us > self._limit_us >= period_us and gap_us - period_us > PAUSE * self._limit_us:
            self._paused += going_on
            return
        mode = "mixed" if size.chunks else "split" if launch.num_sms < num_sms else "turns"
        aim = self.aims[mode]
        if gap_us > self._limit_us:
            spent = min(MOST, 2 * self.share / self._allowed) if self._allowed else 1.0
            self.aims[mode] = max(LEAST_AIM, aim - BACK_OFF * spent)
        elif gap_us > NEAR * aim * self._limit_us:
            self.aims[mode] = min(MOST_AIM, aim + GIVE_BACK[mode])

    def _count(self, rows: int, gap_us: float) -> None:
        self._gaps += rows
        self._late += rows * (gap_us > self._limit_us)
        if self._gaps > WINDOW:
            self._late *= WINDOW / self._gaps
            self._paused *= WINDOW / self._gaps
            self._gaps = WINDOW
