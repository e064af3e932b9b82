"""Regressions of prefill and decode alone, one of each per partition."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from smkern.errors import LatencyError
from smkern.latency.least_squares import fit
from smkern.latency.sample import Sample
from smkern.latency.work import Kind, Size

PREFILL_TERMS = ("sum n^2", "sum n*r", "sum n", "1")
DECODE_TERMS = ("sum r", "batch", "1")

_PRODUCT = PREFILL_TERMS.index("sum n*r")
_Rows = tuple[list[tuple[float, ...]], list[float]]
"""Terms and times of a partition's launches."""
_WANTED = {
    "prefill": "prompts of more lengths, with and without cached tokens",
    "decode": "steps of more batches and lengths",
}


def prefill_terms(size: Size) -> tuple[float, float, float, float]:
    """Of prompts, n new tokens behind r cached ones: sum n^2, sum n*r, sum n, 1; times the share
    of the layers that the launch runs."""
    squares = products = tokens = 0
    for new, cached in size.chunks:
        squares += new * new
        products += new * cached
        tokens += new
    share = 1.0 if size.batch else size.layers / size.num_layers
    return share * squares, share * products, share * tokens, share


def decode_terms(size: Size) -> tuple[float, float, float]:
    """Of a launch's decode rows, r keys each: sum r, rows, 1."""
    return size.total_kv, size.batch, 1.0


class SoloRun:
    """Times of launches alone: a regression for each phase and partition.

        prefill = t1 sum n^2 + t2 sum n*r + t3 sum n + t4
        decode = t1 sum r + t2 batch + t3

    Deviations, where the papers say nothing: coefficients are at least 0 and errors relative
    (`smkern.latency.least_squares`); between two measured partitions a time is linear in 1/SMs; a
    partition with too few launches for its coefficients counts as not measured, but where only
    cached tokens are missing t2 is that of the nearest partition, inversely to SMs; some layers of
    a prompt take their share; a forward of prompts and decode rows, which these systems never
    launch, takes as long as both after each other.

    Args:
        samples: Measured launches; those beside others, and of both kinds, are left out.

    Raises:
        LatencyError: no partition determines the coefficients of prefill, or of decode.

    Source: DRIFT section 3.4 and MuxWise section 3.3.2, equations 1 and 2 of both.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        alone = [sample for sample in samples if sample.alone]
        self._prefill = _Phase("prefill", alone, prefill_terms, PREFILL_TERMS)
        self._decode = _Phase("decode", alone, decode_terms, DECODE_TERMS)

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it, microseconds; 0 for a launch of nothing.

        Raises:
            LatencyError: fewer SMs than the least partition that was measured, or more than the
                largest.
        """
        us = 0.0
        if size.chunks:
            t1, t2, t3, t4 = self._prefill.at(num_sms)
            squares, products, tokens, one = prefill_terms(size)
            us = t1 * squares + t2 * products + t3 * tokens + t4 * one
        if size.batch:
            t1, t2, t3 = self._decode.at(num_sms)
            us += t1 * size.total_kv + t2 * size.batch + t3
        return us

    def partitions(self, kind: Kind) -> tuple[int, ...]:
        """SMs of the partitions whose coefficients are known, for prefill or decode."""
        return (self._prefill if kind == "prefill" else self._decode).measured


class _Phase:
    """The regressions of a phase, by SMs."""

    def __init__(
        self,
        kind: Kind,
        samples: Iterable[Sample],
        terms: Callable[[Size], tuple[float, ...]],
        names: tuple[str, ...],
    ) -> None:
        self._kind = kind
        self._names = names
        self._remedy = f"measure {_WANTED[kind]}: smkern profile --model"
        self._refused: list[str] = []
        groups: dict[int, _Rows] = {}
        for sample in samples:
            if sample.kind == kind:
                rows, times = groups.setdefault(sample.num_sms, ([], []))
                rows.append(terms(sample.size))
                times.append(sample.us)
        fits = {sms: self._fit(sms, group, range(len(names))) for sms, group in groups.items()}
        known = {sms: found for sms, found in fits.items() if found}
        if kind == "prefill" and known:
            known |= self._borrowing({s: g for s, g in groups.items() if s not in known}, known)
        if not known:
            none = f"{kind}: none was measured; {self._remedy}"
            raise LatencyError(self._refused[0] if self._refused else none)
        self._fits = {sms: known[sms] for sms in sorted(known)}
        self.measured = tuple(self._fits)
        self.at = lru_cache(maxsize=None)(self._at)

    def _fit(self, num_sms: int, group: _Rows, kept: Sequence[int]) -> tuple[float, ...]:
        """Coefficients of the terms that are kept; none where the launches do not tell them."""
        rows, times = group
        names = [self._names[i] for i in kept]
        what = f"{self._kind} on {num_sms} SMs"
        kept_rows = [[row[i] for i in kept] for row in rows]
        try:
            return fit(kept_rows, times, names, what=what, remedy=self._remedy)
        except LatencyError as error:
            self._refused.append(str(error))
            return ()

    def _borrowing(
        self, groups: Mapping[int, _Rows], known: Mapping[int, tuple[float, ...]]
    ) -> dict[int, tuple[float, ...]]:
        """Partitions on which nothing cached was measured: n x r as on the nearest, by SMs."""
        found = {}
        for num_sms, group in groups.items():
            if any(row[_PRODUCT] for row in group[0]):
                continue
            rest = self._fit(num_sms, group, [i for i in range(4) if i != _PRODUCT])
            if rest:
                nearest = min(known, key=lambda sms: abs(sms - num_sms))
                borrowed = known[nearest][_PRODUCT] * nearest / num_sms
                found[num_sms] = (*rest[:_PRODUCT], borrowed, *rest[_PRODUCT:])
        return found

    def _at(self, num_sms: int) -> tuple[float, ...]:
        """Its coefficients; between two partitions linear in 1/SMs."""
        known = self._fits.get(num_sms)
        if known:
            return known
        right = bisect_left(self.measured, num_sms)
        if right in (0, len(self.measured)):
            listed = ", ".join(map(str, self.measured))
            refused = "".join(f" ({text})" for text in self._refused[:1])
            raise LatencyError(
                f"{self._kind} on {num_sms} SMs lies outside the measured partitions, {listed}: "
                f"measure it there (smkern profile --model), or take one between{refused}"
            )
        low, high = self.measured[right - 1], self.measured[right]
        share = (1 / low - 1 / num_sms) / (1 / low - 1 / high)
        pairs = zip(self._fits[low], self._fits[high], strict=True)
        return tuple(a + share * (b - a) for a, b in pairs)
