"""The cells of a table from a profile: what was timed of requests that are alike."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.latency.sample import Sample
from smkern.latency.table import Timing
from smkern.latency.work import Size


def timings_of(samples: Iterable[Sample]) -> dict[Timing, float]:
    """The cells that a table holds of samples; those of unlike requests are left out.

    Args:
        samples: Measured launches.

    Returns:
        Times, us.
    """
    found = {}
    for sample in samples:
        timing = timing_of(sample)
        if timing is not None:
            found[timing] = sample.us
    return found


def timing_of(sample: Sample) -> Timing | None:
    """A sample as a cell; None where its chunks differ, or its rows or its neighbour's may."""
    size, beside = sample.size, sample.beside
    if not _is_alike(size) or (beside is not None and not _is_alike(beside)):
        return None
    other = beside or Size()
    return Timing(
        sample.kind,
        sample.num_sms,
        batch=size.batch,
        context=_context(size),
        prompts=len(size.chunks),
        tokens=size.chunks[0].new if size.chunks else 0,
        cached=size.chunks[0].cached if size.chunks else 0,
        layers=0 if size.head or not size.chunks else size.layers,
        beside_sms=sample.beside_sms,
        beside_batch=other.batch,
        beside_context=_context(other),
        beside_tokens=other.chunks[0].new if other.chunks else 0,
        beside_cached=other.chunks[0].cached if other.chunks else 0,
    )


def _is_alike(size: Size) -> bool:
    chunks = len(set(size.chunks)) <= 1
    return chunks and (not size.batch or size.total_kv % size.batch == 0)


def _context(size: Size) -> int:
    return size.total_kv // size.batch if size.batch else 0
