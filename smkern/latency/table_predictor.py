"""A predictor that interpolates between measured launches of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

from smkern.device import gpu_folder
from smkern.errors import ArgumentError, TableError
from smkern.latency.curve import Curve
from smkern.latency.prompt_times import PromptTimes
from smkern.latency.roofline import Roofline
from smkern.latency.sizes import ModelSizes
from smkern.latency.step_times import KEPT, StepTimes
from smkern.latency.table import Timing, read_timings, shipped, shipped_path
from smkern.latency.work import Size
from smkern.profile import DEFAULT, Profile, load_profile

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

UNMEASURED_BESIDE = 1.25
"""Slowdown beside other work, where no cell says more: a long prompt's beside decode on 48 SMs."""


class TablePredictor:
    """Times of launches from a table of measured ones.

    A launch's roofline is the sum over its kernels of the larger of bytes over bandwidth and FLOPs
    over rate. What is measured of a launch is its time over that, and that is what is interpolated:
    linearly in the logarithms of SMs, decode rows and keys of each, or SMs and new tokens; beyond
    the cells the nearest one's holds, so that sizes outside scale as their roofline does. A cell's
    own launch comes back as it was measured.

    - A decode step takes r_d times its roofline.
    - Prompts, and prompts with decode rows in one forward, take the sum over kernels of
      max(r_d bytes, r_p FLOPs), r_p from cells of prompts; a mixed forward at least what its
      decode rows take alone, and cells of mixed forwards correct it by SMs and by all its rows,
      where there are any.
    - Some layers of a prompt take their share; the head is computed where the launch has it.
    - A slowdown is the time beside the other kind over the time alone, by SMs and decode rows, from
      splits whose sides are never dry where there are such cells. It does not depend on how long
      the other side is, and counts a side that runs as busy.
      Launches that share SMs, as in an impatient switch, are slowed by the SMs that they would
      need besides.

    Args:
        timings: Measured times, us.
        sizes: The model that they are of.
        profile: The device.

    Raises:
        ArgumentError: there are no timings.

    Source: MuxWise section 3.3 for interpolation of measured latencies and a slowdown of decode by
        cells; the roofline under it makes few cells enough.

    Example:
        >>> from smkern.latency import Size, TablePredictor
        >>> predictor = TablePredictor.load("qwen3-8b")
        >>> step = Size(batch=64, total_kv=64 * 2048)
        >>> predictor.alone_us(step, 16) > 1.5 * predictor.alone_us(step, 132)
        True
    """

    def __init__(
        self, timings: Mapping[Timing, float], sizes: ModelSizes, profile: Profile
    ) -> None:
        if not timings:
            raise ArgumentError("no timings: a predictor from a table needs one cell at least")
        self.sizes = sizes
        self.profile = profile
        alone = {key: us for key, us in timings.items() if not key.beside_sms}
        beside = {key: us for key, us in timings.items() if key.beside_sms}
        roofline, layers = Roofline(sizes, profile), sizes.num_layers
        self._steps = StepTimes(alone, roofline)
        self._prompts = PromptTimes(alone, roofline, self._steps)
        slowed = [
            (key, max(1.0, us / self.alone_us(key.size(layers), key.num_sms)))
            for key, us in beside.items()
        ]
        self._decode_beside = _Slowdowns(
            (_decode_point(key), ratio, key.beside_tokens > 0)
            for key, ratio in slowed
            if key.kind == "decode"
        )
        self._prefill_beside = _Slowdowns(
            ((key.num_sms, key.beside_batch), ratio, key.beside_context > 0)
            for key, ratio in slowed
            if key.kind == "prefill" and key.beside_batch
        )

    @classmethod
    def load(cls, model: str = "qwen3-8b", gpu: str | None = None) -> TablePredictor:
        """From the table that smkern ships for a model.

        Args:
            model: A preset's name, whatever the case.
            gpu: The GPU's name, "NVIDIA H200" or "h200"; None: the H200 that plans are made for
                without a GPU, whatever GPU is here.

        Raises:
            TableError: no table for that model on that GPU.
            ProfileError: no profile of that GPU.
        """
        gpu = gpu or DEFAULT
        path = shipped_path(model, gpu)
        if not path.exists():
            raise TableError(
                f"no timings of {model!r} on {gpu!r}; there are {shipped(gpu)}. Fill a table with "
                "smkern bench latency-table, or take another model's: "
                'TablePredictor.load("qwen3-8b").for_model(config)'
            )
        return cls.read(path, load_profile(gpu_folder(gpu)))

    @classmethod
    def read(cls, path: Path | str, profile: Profile | None = None) -> TablePredictor:
        """From a table's file.

        Args:
            path: A table that `smkern bench latency-table` wrote.
            profile: Profile of its device; None: the shipped one of that name.

        Raises:
            TableError: no such file, or no valid table.
            ProfileError: no profile of that GPU.
        """
        cells, sizes = read_timings(Path(path))
        if profile is None:
            profile = load_profile(gpu_folder(str(cells.meta.get("gpu", DEFAULT))))
        return cls(cells.cells, sizes, profile)

    def for_model(self, config: ModelConfig | ModelSizes) -> TablePredictor:
        """For a model without timings: its own rooflines, this model's times over them."""
        other = copy(self)
        other.sizes = ModelSizes.of(config)
        roofline = Roofline(other.sizes, self.profile)
        other._steps = self._steps.over(roofline)
        other._prompts = self._prompts.over(roofline, other._steps)
        return other

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it.

        Args:
            size: What it is made of; its `num_layers` are those of the predictor's model.
            num_sms: SMs of its place.

        Returns:
            Microseconds; 0 for a launch of nothing.

        Raises:
            ProfileError: more SMs than the device has.
        """
        if size.chunks:
            return self._prompts.us(size, num_sms)
        return self._steps.us(num_sms, size.batch, size.total_kv)

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """How many times longer a launch takes while another runs on other SMs.

        Args:
            size: The launch.
            num_sms: SMs of its place.
            beside: The other.
            beside_sms: SMs of the other's place.

        Returns:
            At least 1.
        """
        if size.chunks:
            ratio = self._prefill_beside.at(num_sms, beside.batch or beside.new_tokens)
        elif size.batch:
            ratio = self._decode_beside.at(num_sms, size.batch, size.total_kv / size.batch)
        else:
            ratio = UNMEASURED_BESIDE
        return ratio * max(1.0, (num_sms + beside_sms) / self.profile.info.num_sms)


class _Slowdowns:
    """Slowdowns by SMs from cells of two sides that were never dry, and by the other coordinates
    from cells that were timed in bursts, whose power has not settled: these say by how much a size
    is slowed more than that of the steady cells, not how much that is.

    Args:
        points: (coordinates, slowdown, whether it is a steady cell's); SMs come first.
    """

    def __init__(self, points: Iterable[tuple[tuple[float, ...], float, bool]]) -> None:
        cells = list(points)
        steady = [(point, ratio) for point, ratio, is_steady in cells if is_steady]
        self._bursts = Curve.of(
            (point, ratio) for point, ratio, is_steady in cells if not is_steady
        )
        self._size = steady[0][0][1:] if steady else ()
        self._steady = Curve.of((point[:1], ratio) for point, ratio in steady)
        self._kept: dict[tuple[int, int], tuple[float, Curve]] = {}

    def at(self, num_sms: int, batch: int, context: float | None = None) -> float:
        """A slowdown by SMs and decode rows, and by the keys of each where a step is slowed."""
        found = self._kept.get((num_sms, batch))
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            found = self._kept[num_sms, batch] = self._by_context(num_sms, batch, context)
        fixed, curve = found
        more = fixed if not curve or context is None else fixed + curve.at(context)
        return more if more > 1.0 else 1.0

    def _by_context(self, num_sms: int, batch: int, context: float | None) -> tuple[float, Curve]:
        """What is to be added to a curve over the keys of each row."""
        if not self._bursts:
            fixed = self._steady.at(num_sms) if self._steady else UNMEASURED_BESIDE
            return fixed, self._bursts
        fixed = 0.0
        if self._steady:
            fixed = self._steady.at(num_sms) - self._bursts.at(num_sms, *self._size)
        rest = self._bursts.slice(num_sms)
        if context is None:
            return fixed + rest.at(batch), Curve((), ())
        return fixed, rest.slice(batch)


def _decode_point(key: Timing) -> tuple[float, float, float]:
    return key.num_sms, key.batch, key.context
