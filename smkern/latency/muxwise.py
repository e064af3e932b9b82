"""MuxWise's latency model: regressions of either phase alone, and a guard for contention."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.errors import LatencyError
from smkern.latency.guard import Cell, ContentionGuard
from smkern.latency.sample import Sample
from smkern.latency.solo import SoloRun
from smkern.latency.work import Size


class MuxWise(SoloRun):
    """What either phase takes alone, times the worst slowdown of decode in the pair's cell.

    The solo-run predictor is DRIFT's (`SoloRun`). The guard holds the largest slowdown of decode by
    cells of five variables: new and cached tokens of the prompts, decode rows, keys of a row, and
    the partition. Prefill's slowdown is 1: it need not be known, only its end is waited for.

    The paper fills its grid by measuring 15 x 4 x 20 x 6 = 7,200 pairs: new, cached and a row's
    keys at powers of 4 from 2K to 128K (new and cached not both 128K), about 20 batch sizes, and
    partitions by 16 SMs. Here it is thinned: the cells are the same, but for batches by powers of
    2, and some two hundred pairs are measured, so that most cells have none: a cell takes the
    largest slowdown of all that touch it, where the paper has that of a cell's measured corners, or
    of the nearest that were measured. Other deviations: a slowdown is over the solo-run
    *prediction*, so that the guard covers that predictor's error too, and an observation needs no
    second measurement; what is shorter than 2K shares the first cell; pairs on partitions whose
    solo run is not known are left out; and those of `SoloRun`.

    Args:
        samples: Measured launches, alone and beside each other.

    Raises:
        LatencyError: no partition determines the coefficients of prefill, or of decode; or no
            decode step was measured beside prompts.

    Source: MuxWise section 3.3.2.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        samples = list(samples)
        super().__init__(samples)
        self._guard = ContentionGuard()
        partitions = self.partitions("decode")
        for sample in samples:
            self.observe(sample.size, sample.num_sms, sample.us, sample.beside, sample.beside_sms)
        if not self._guard:
            raise LatencyError(
                f"no decode step beside prompts on {partitions[0]} to {partitions[-1]} SMs among "
                f"{len(samples)} samples, so the guard knows no slowdown; measure pairs: smkern "
                "profile --model"
            )

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """The guard's for a decode step beside prompts, at least 1; else 1."""
        if size.chunks or not size.batch or not beside.chunks:
            return 1.0
        return max(1.0, self._guard.at(Cell.of(size, num_sms, beside)))

    def worst_us(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """The longest that a decode step is expected to take beside prompts, microseconds.

        Args:
            size: The decode step.
            num_sms: SMs of its place.
            beside: The prompts.
            beside_sms: SMs of theirs.
        """
        return self.alone_us(size, num_sms) * self.slowdown(size, num_sms, beside, beside_sms)

    def observe(
        self, size: Size, num_sms: int, us: float, beside: Size | None = None, beside_sms: int = 0
    ) -> bool:
        """Refine the guard by a launch that was timed while serving.

        Args:
            size: What it was made of; what is no decode step changes nothing.
            num_sms: SMs of its place; outside the partitions that were measured nothing changes.
            us: How long it took.
            beside: What ran beside it all the time; other than prompts it changes nothing.
            beside_sms: SMs of that.

        Returns:
            Whether the guard of its cell grew.
        """
        if size.chunks or not size.batch or beside is None or not beside.chunks:
            return False
        partitions = self.partitions("decode")
        if not partitions[0] <= num_sms <= partitions[-1]:
            return False
        slowdown = us / self.alone_us(size, num_sms)
        return self._guard.raise_to(Cell.of(size, num_sms, beside), slowdown)
