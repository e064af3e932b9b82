"""Measured launches, as the latency models are fitted to them and judged by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from smkern.errors import ArgumentError
from smkern.latency.table import Timing
from smkern.latency.work import Chunk, Kind, Size


@dataclass(frozen=True, slots=True)
class Sample:
    """One launch and how long it took.

    Attributes:
        size: What it was made of.
        num_sms: SMs that it ran on.
        us: Its time, microseconds; the median where it was repeated.
        beside: What ran on other SMs meanwhile; None: nothing, or nobody wrote down what.
        beside_sms: SMs of that; 0: nothing ran beside it.

    Raises:
        ArgumentError: the launch is empty or cannot be, or SMs or time are not positive.

    Example:
        >>> from smkern.latency import Size
        >>> step = Sample(Size(batch=64, total_kv=64 * 2048), 24, 14_169.2)
        >>> step.kind, step.alone
        ('decode', True)
    """

    size: Size
    num_sms: int
    us: float
    beside: Size | None = None
    beside_sms: int = 0

    def __post_init__(self) -> None:
        if not self.size.chunks and not self.size.batch:
            raise ArgumentError("a sample of an empty launch: it needs a prompt or a decode row")
        _check_counts(self.size, self.beside)
        if self.num_sms < 1 or self.beside_sms < 0 or not self.us > 0:
            raise ArgumentError(
                f"a sample of {self.us} us on {self.num_sms} SMs beside {self.beside_sms}: "
                "time and SMs are above 0, the neighbour's SMs 0 or more"
            )
        if self.beside is not None and not self.beside_sms:
            raise ArgumentError(f"a sample beside {self.beside} on 0 SMs: give beside_sms")

    @property
    def kind(self) -> Kind:
        """The launch's."""
        return self.size.kind

    @property
    def alone(self) -> bool:
        """Whether nothing ran beside it."""
        return not self.beside_sms

    @classmethod
    def of(cls, timing: Timing, us: float, num_layers: int) -> Sample:
        """A table's cell.

        Args:
            timing: What was timed.
            us: Its time, microseconds.
            num_layers: Layers of the table's model.
        """
        return cls(
            timing.size(num_layers),
            timing.num_sms,
            us,
            _beside(timing, num_layers),
            timing.beside_sms,
        )


def samples_of(timings: Mapping[Timing, float], num_layers: int) -> list[Sample]:
    """All cells of a table, in its order.

    Args:
        timings: Measured times, microseconds.
        num_layers: Layers of the table's model.
    """
    return [Sample.of(timing, us, num_layers) for timing, us in timings.items()]


def _check_counts(size: Size, beside: Size | None) -> None:
    """What models divide by, or take the logarithm of, is above 0."""
    for chunk in (*size.chunks, *(() if beside is None else beside.chunks)):
        if chunk.new < 1:
            raise ArgumentError(
                f"a sample of a prompt with {chunk.new} new tokens: it has 1 or more"
            )
    if size.num_layers < 1:
        raise ArgumentError(f"a sample of a model of {size.num_layers} layers: it has 1 or more")
    if size.chunks and not size.batch and not 1 <= size.layers <= size.num_layers:
        raise ArgumentError(
            f"a sample of {size.layers} layers of prompts: give 1 to {size.num_layers}, the model's"
        )
    if size.batch and size.total_kv < 1:
        raise ArgumentError(
            f"a sample of {size.batch} decode rows with {size.total_kv} keys: each reads its own"
        )


def _beside(timing: Timing, num_layers: int) -> Size | None:
    """The neighbour, as far as the cell says what it was."""
    if timing.beside_tokens:
        chunk = Chunk(timing.beside_tokens, timing.beside_cached)
        return Size((chunk,), num_layers, num_layers, True)
    if timing.beside_batch:
        keys = timing.beside_batch * timing.beside_context
        return Size(num_layers=num_layers, batch=timing.beside_batch, total_kv=keys)
    return None
