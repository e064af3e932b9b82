"""How much longer a launch takes beside another: by what both take of the memory and of power."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, log, log2, sqrt
from typing import NamedTuple

from smkern.latency.least_squares import fit_any_sign
from smkern.latency.prompt_times import PromptTimes
from smkern.latency.roofline import Roofline
from smkern.latency.step_times import KEPT, StepTimes
from smkern.latency.work import Chunk, Size

OCTAVE = 2
"""Parts of a doubling of rows, keys or tokens that are told apart: a slowdown changes by a percent
or so from one to the next, and what was asked for once is kept."""
LEAST, MOST = 1.0, 6.0
"""Between which slowdowns are: far from all that was timed a line leads anywhere."""
FURTHER = 1
"""The term that goes further than what was timed: prompts of a few tokens do little but read the
weights, and steps are slowed by that (18% too fast at worst, 24% without)."""
RIDGE = 0.3
"""Weight of coefficients of 0, which where all terms are alike keeps them small."""


class Pair(NamedTuple):
    """A decode step beside prompts, by what tells their contention.

    Attributes:
        step_sms: SMs of the step.
        prompt_sms: SMs of the prompts.
        batch: Rows of the step.
        context: Keys of a row.
        tokens: New tokens of the prompts.
        cached: Cached tokens in front of each new one, in the mean.
    """

    step_sms: int
    prompt_sms: int
    batch: float
    context: float
    tokens: float
    cached: float

    @classmethod
    def of(cls, step: Size, step_sms: int, prompts: Size, prompt_sms: int) -> Pair:
        """Of two launches."""
        tokens = behind = 0
        for new, cached in prompts.chunks:
            tokens += new
            behind += new * cached
        batch = step.batch
        return cls(step_sms, prompt_sms, batch, step.total_kv / batch, tokens, behind / tokens)


class Usage:
    """The terms of a pair: what each side alone takes of the whole device.

    Args:
        steps, prompts: Times alone.
        roofline: Of the model on the device.
        num_sms: SMs of the device.
    """

    def __init__(
        self, steps: StepTimes, prompts: PromptTimes, roofline: Roofline, num_sms: int
    ) -> None:
        self._steps, self._prompts = steps, prompts
        self._roofline, self._num_sms = roofline, num_sms

    def of(self, pair: Pair) -> tuple[float, ...]:
        """SMs of the step; share of the prompts in bandwidth, FLOP rate and attention, of the step
        in the first two; sizes. SMs and sizes by their logarithm."""
        layers = self._roofline.num_layers
        batch = max(1, round(pair.batch))
        step = Size(num_layers=layers, batch=batch, total_kv=max(1, round(batch * pair.context)))
        chunk = Chunk(max(1, round(pair.tokens)), round(pair.cached))
        prompt = Size((chunk,), layers, layers, head=True)
        # first the times, which refuse SMs that the device has not
        step_us = self._steps.us(pair.step_sms, batch, step.total_kv)
        prompt_us = self._prompts.us(prompt, pair.prompt_sms)
        return (
            log2(pair.step_sms),
            *self._shares(prompt, prompt_us),
            self._prompts.attention_share(prompt, pair.prompt_sms),
            *self._shares(step, step_us),
            log2(max(pair.tokens, 1)),
            log2(batch),
            log2(max(pair.context, 1)),
        )

    def _shares(self, size: Size, us: float) -> tuple[float, float]:
        bounds = self._roofline.bounds(size, self._num_sms)
        return sum(b.bytes_us for b in bounds) / us, sum(b.flops_us for b in bounds) / us


class Slowdowns:
    """A line in a pair's terms and in the square and the cube of its SMs.

    It goes near the pairs that were timed and not through them: single ones are a tenth slower in
    one profile than in the next, which says nothing of others. Terms are in standard deviations of
    what was timed, and go no further than that did, but for the prompts' share of the bandwidth.

    Args:
        pairs: Pairs and their slowdowns.
        terms: A pair's terms, SMs first.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Pair, float]],
        terms: Callable[[Pair], tuple[float, ...]],
    ) -> None:
        timed = list(pairs)
        self._terms = terms
        rows = [terms(pair) for pair, _ in timed]
        scales = [_Scale.of(column) for column in zip(*rows, strict=True)]
        self._scales = [
            scale.wider() if index == FURTHER else scale for index, scale in enumerate(scales)
        ]
        logs = [log(max(ratio, LEAST)) for _, ratio in timed]
        self._line = _ridge([self._row(row) for row in rows], logs)
        self._kept: dict[tuple[int, ...], float] = {}

    def __bool__(self) -> bool:
        return bool(self._line)

    def seen_by(self, terms: Callable[[Pair], tuple[float, ...]]) -> Slowdowns:
        """The same, with another model's terms."""
        other = Slowdowns([], terms)
        other._scales, other._line = self._scales, self._line
        return other

    def at(self, pair: Pair) -> float:
        """The slowdown of a pair, at least 1."""
        key = (*pair[:2], *[round(OCTAVE * log2(x + 1)) for x in pair[2:]])
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            sizes = [2.0 ** (x / OCTAVE) - 1 for x in key[2:]]
            found = self._kept[key] = self._compute(Pair(*key[:2], *sizes))
        return found

    def _compute(self, pair: Pair) -> float:
        row = self._row(self._terms(pair))
        slower = exp(sum(a * b for a, b in zip(self._line, row, strict=True)))
        return min(max(LEAST, slower), MOST)

    def _row(self, terms: Sequence[float]) -> tuple[float, ...]:
        scaled = [scale(x) for scale, x in zip(self._scales, terms, strict=True)]
        return (1.0, scaled[0] ** 2, scaled[0] ** 3, *scaled)


class _Scale(NamedTuple):
    """Bounds, mean and standard deviation of a term."""

    low: float
    high: float
    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        mean = sum(values) / len(values)
        deviation = sqrt(sum((x - mean) ** 2 for x in values) / len(values))
        return cls(min(values), max(values), mean, deviation or 1.0)

    def wider(self) -> _Scale:
        """With half of its range more on both sides."""
        more = (self.high - self.low) / 2
        return self._replace(low=self.low - more, high=self.high + more)

    def __call__(self, x: float) -> float:
        return (min(max(x, self.low), self.high) - self.mean) / self.deviation


def _ridge(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients with the least squares, all but the first drawn to 0."""
    if not rows:
        return ()
    count = len(rows[0])
    zeros = [tuple(sqrt(RIDGE) if i == j else 0.0 for j in range(count)) for i in range(1, count)]
    return fit_any_sign([*rows, *zeros], [*values, *[0.0] * len(zeros)])
