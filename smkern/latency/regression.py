"""References that the latency models are held against: no contention, and one linear regression."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.errors import LatencyError
from smkern.latency.least_squares import fit_any_sign
from smkern.latency.predictor import Predictor
from smkern.latency.sample import Sample
from smkern.latency.work import Kind, Size

LEAST_US = 1.0
"""A line falls below 0 somewhere; a launch takes longer than this."""


class ContentionIgnored:
    """Another predictor's times alone; beside a neighbour the same.

    Args:
        predictor: Whose times.

    Source: Bullet section 3.2.4, Figure 11.

    Example:
        >>> from smkern.latency import Size, TablePredictor
        >>> step, prompts = Size(batch=64, total_kv=64 * 2048), Size(layers=1)
        >>> ContentionIgnored(TablePredictor.load("qwen3-8b")).slowdown(step, 32, prompts, 100)
        1.0
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def alone_us(self, size: Size, num_sms: int) -> float:
        """The other predictor's."""
        return self._predictor.alone_us(size, num_sms)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """1."""
        return 1.0


class LinearRegression:
    """One line for each kind of launch over the execution state, prompts' tokens squared with it.

        time = t . (tokens, tokens^2, prompts, rows, keys of each, SMs; the neighbour's; 1)

    The neighbour's are 0 where nothing runs beside it. Least squares of the times themselves; a
    term that never varies gets 0, so that any samples will do.

    Args:
        samples: Measured launches, alone and beside each other.

    Raises:
        LatencyError: there are none.

    Source: Bullet section 3.2.4, Figure 11: a linear regression over the parameters of the
        execution state, with a quadratic term for the prompt's length.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        groups: dict[Kind, list[Sample]] = {}
        for sample in samples:
            if sample.alone or sample.beside is not None:
                groups.setdefault(sample.kind, []).append(sample)
        if not groups:
            raise LatencyError(
                "no samples: a regression needs one; measure: smkern profile --model"
            )
        self._lines = {kind: _line(group) for kind, group in groups.items()}

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it, microseconds; 0 for a launch of nothing.

        Raises:
            LatencyError: no launch of this kind was measured.
        """
        return self._us(size, num_sms, _NOTHING, 0)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """How many times longer it takes while `beside` runs on other SMs; at least 1."""
        if not size.chunks and not size.batch:
            return 1.0
        us = self._us(size, num_sms, beside, beside_sms)
        return max(1.0, us / self.alone_us(size, num_sms))

    def _us(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        if not size.chunks and not size.batch:
            return 0.0
        line = self._lines.get(size.kind)
        if line is None:
            raise LatencyError(f"no {size.kind} was measured; measure some: smkern profile --model")
        state = _state(size, num_sms, beside, beside_sms)
        us = sum(t * x for t, x in zip(line, state, strict=True))
        share = 1.0 if size.batch else size.layers / size.num_layers
        return share * max(us, LEAST_US)


_NOTHING = Size()


def _line(samples: list[Sample]) -> tuple[float, ...]:
    rows = []
    for sample in samples:
        beside = sample.beside or _NOTHING
        rows.append(_state(sample.size, sample.num_sms, beside, sample.beside_sms))
    return fit_any_sign(rows, [sample.us for sample in samples])


def _state(size: Size, num_sms: int, beside: Size, beside_sms: int) -> tuple[float, ...]:
    return (1.0, *_side(size, num_sms), *_side(beside, beside_sms))


def _side(size: Size, num_sms: int) -> tuple[float, ...]:
    tokens, prompts = size.new_tokens, len(size.chunks)
    keys = size.total_kv / size.batch if size.batch else 0.0
    return tokens, tokens * tokens, prompts, size.batch, keys, num_sms
