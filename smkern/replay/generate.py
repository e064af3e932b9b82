"""Traces that are drawn: lengths fitted to the papers' tables, seeded.

A length is log-normal, cut at the least and the most that the table gives: these lie three
standard deviations apart from the middle of the logarithms, and the median is solved for the mean.
Arrivals are Poisson at 1 request/s; `Trace.at_rate` gives others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, erf, exp, log, sqrt
from random import Random

from smkern.errors import ArgumentError, TraceError
from smkern.limits import as_int
from smkern.replay.trace import Arrival, Trace, mixed

SPREAD = 6.0
"""Standard deviations from the least to the most, in logarithms."""
BLOCK = 512
OPENTHOUGHTS_SHARED = 243
"""Tokens of the system prompt that all of OpenThoughts have in common (MuxWise Table 1)."""
REUSED = 4496 / 7538
"""Share of a conversation's prompts that earlier turns had (MuxWise Table 1, Conversation)."""
TURN_TOKENS = 1500.0
"""Mean tokens by which a turn is longer than the one before it: chosen, no table says."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Least, mean and most tokens.

    Example:
        >>> lengths = Lengths(4, 226, 1024)
        >>> draw = Random(0)
        >>> drawn = [lengths.draw(draw) for _ in range(4000)]
        >>> min(drawn) >= 4 and max(drawn) <= 1024 and abs(sum(drawn) / 4000 - 226) < 12
        True
    """

    least: int
    mean: float
    most: int

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        return log(self.most / self.least) / SPREAD

    @property
    def mu(self) -> float:
        """Logarithm of the median, solved for the mean of what is cut."""
        low, high = log(self.least), log(self.most)
        for _ in range(60):
            middle = (low + high) / 2
            if self._mean(middle) < self.mean:
                low = middle
            else:
                high = middle
        return high

    def draw(self, random: Random, mu: float | None = None) -> int:
        """A length; `mu` saves solving for it."""
        value = exp(random.gauss(self.mu if mu is None else mu, self.sigma))
        return round(min(max(value, self.least), self.most))

    def _mean(self, mu: float) -> float:
        """Of exp(mu + sigma z), cut at both ends."""
        sigma = self.sigma
        low, high = (log(self.least) - mu) / sigma, (log(self.most) - mu) / sigma
        inner = exp(mu + sigma**2 / 2) * (_normal(high - sigma) - _normal(low - sigma))
        return self.least * _normal(low) + inner + self.most * (1 - _normal(high))


@dataclass(frozen=True, slots=True)
class Load:
    """Independent requests.

    Attributes:
        prompt, output: Their lengths.
        shared: Tokens at the begin of all prompts.
        source: What the lengths are fitted to.
    """

    prompt: Lengths
    output: Lengths
    source: str
    shared: int = 0


LOADS = {
    "sharegpt-like": Load(
        Lengths(4, 226, 1024), Lengths(4, 195, 1838), "MuxWise Table 1: least, mean, most of both"
    ),
    "loogle-like": Load(
        Lengths(3380, 30_000, 81_000),
        Lengths(2, 15, 326),
        "MuxWise Table 1: least, mean, most of both",
    ),
    "openthoughts-like": Load(
        Lengths(311, 709, 4633),
        Lengths(684, 8374, 32_000),
        "MuxWise Table 1: least, mean, most of both, and the tokens that all share",
        OPENTHOUGHTS_SHARED,
    ),
    "arxiv-like": Load(
        Lengths(800, 6000, 16_000),
        Lengths(40, 220, 600),
        "chosen: Bullet Figure 14 draws arXiv-Summary's lengths and no table says them",
    ),
    "writing-like": Load(
        Lengths(4, 226, 1024),
        Lengths(32, 1560, 8192),
        "prompts of sharegpt-like; outputs eight times as long: chosen, no paper's",
    ),
    "rewriting-like": Load(
        Lengths(200, 2500, 12_000),
        Lengths(100, 900, 4000),
        "documents and outputs of a third their length: chosen, no paper's, so that prompts and "
        "decode take about as long",
    ),
}

CONVERSATION_OUTPUT = Lengths(1, 342, 2000)
MAX_REQUESTS = 10_000_000
CONVERSATION = (
    "MuxWise Table 1, Conversation: means of prompt, output and reused, least and most of prompt "
    "and output; turns lengthen by a mean of 1,500 tokens (chosen)"
)


def generated(name: str, requests: int, seed: int) -> Trace:
    """A trace of one of `GENERATORS`, or of several joined by "+" in equal parts.

    Raises:
        TraceError: no such generator, or numbers of requests or seeds that cannot be.
    """
    try:
        requests = as_int("requests", requests, 1, MAX_REQUESTS)
        seed = as_int("seed", seed, -(2**63), 2**63 - 1)
    except ArgumentError as reason:
        raise TraceError(f"{name}: {reason}") from None
    names = name.split("+")
    unknown = [one for one in names if one not in GENERATORS]
    if unknown:
        raise TraceError(
            f"no trace {', '.join(unknown)}: give the path of a .csv or .jsonl, or one of "
            f"{', '.join(GENERATORS)}, several joined by +"
        )
    parts = [GENERATORS[one](ceil(requests / len(names)), seed + n) for n, one in enumerate(names)]
    whole = parts[0] if len(parts) == 1 else mixed(parts, seed)
    return Trace(name, whole.requests[:requests], whole.block_tokens)


def sources() -> dict[str, str]:
    """What each generator's lengths are fitted to."""
    return {name: load.source for name, load in LOADS.items()} | {"conversation-like": CONVERSATION}


def _independent(name: str) -> Callable[[int, int], Trace]:
    load = LOADS[name]

    def draw(requests: int, seed: int) -> Trace:
        random, at_s, found = Random(seed), 0.0, []
        mus = load.prompt.mu, load.output.mu
        blocks = (0,) if load.shared else ()
        for _ in range(requests):
            prompt = load.prompt.draw(random, mus[0])
            found.append(Arrival(at_s, prompt, load.output.draw(random, mus[1]), blocks))
            at_s += random.expovariate(1.0)
        return Trace(name, tuple(found), load.shared or BLOCK)

    return draw


def _conversation(requests: int, seed: int) -> Trace:
    """Sessions of a geometric count of turns: each prompt is the one before it and more.

    Of all prompts a share q continues another, so the mean reused is q times the mean prompt.
    """
    random = Random(seed)
    q = REUSED
    first = Lengths(891, 7538 - TURN_TOKENS * q / (1 - q), 123_000)
    more = Lengths(64, TURN_TOKENS, 16_000)
    mus = first.mu, more.mu, CONVERSATION_OUTPUT.mu
    found: list[Arrival] = []
    begin_s, session = 0.0, 0
    while len(found) < 3 * requests:  # so that the last sessions' turns do not stand alone
        at_s, prompt, block = begin_s, first.draw(random, mus[0]), session << 12
        while True:
            output = CONVERSATION_OUTPUT.draw(random, mus[2])
            full = prompt // BLOCK
            blocks = tuple(range(block, block + full))
            found.append(Arrival(at_s, prompt, output, blocks))
            if random.random() >= q or prompt + TURN_TOKENS > first.most:
                break
            prompt = min(prompt + max(output, more.draw(random, mus[1])), first.most)
            at_s += random.expovariate(1 / 30.0)
        session += 1
        begin_s += random.expovariate(1 - q)
    found.sort(key=lambda request: request.at_s)
    return Trace("conversation-like", tuple(found[:requests]), BLOCK)


def _normal(z: float) -> float:
    return (1 + erf(z / sqrt(2))) / 2


GENERATORS: dict[str, Callable[[int, int], Trace]] = {
    **{name: _independent(name) for name in LOADS},
    "conversation-like": _conversation,
}
"""Name to generator(requests, seed)."""
