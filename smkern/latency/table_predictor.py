"""A predictor that interpolates between measured launches of a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from smkern.device import gpu_folder
from smkern.errors import ArgumentError, TableError
from smkern.latency.confidence import MOST, TOLD, Confidence
from smkern.latency.contention import Pair, Slowdowns, Usage
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.prompt_times import PromptTimes
from smkern.latency.roofline import Roofline
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.latency.stamp import kernels_hash
from smkern.latency.step_times import StepTimes
from smkern.latency.table import Kind, Timing, find_shipped, gemms_in, read_timings
from smkern.latency.work import Size
from smkern.limits import as_path, shown
from smkern.profile import DEFAULT, Profile, load_profile

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig

GUARD = 1.13
"""What a step beside prompts may take over what is expected."""
UNMEASURED_BESIDE = 1.25
"""Slowdown beside other work, where no cell says more: a long prompt's beside decode on 48 SMs."""


class TablePredictor:
    """Times of launches from a table of measured ones.

    A launch takes a factor of what its GEMMs take by the tuned tables and the cost model, whose
    tiles make times a stair of rows, and a factor of attention's roofline. What is measured is
    these factors, and they are what is interpolated: linearly in the logarithms of SMs, rows and
    keys; beyond the cells the nearest one's holds. Without times of GEMMs their rooflines serve.

    - `StepTimes` has decode steps, `PromptTimes` prompts and mixed forwards.
    - Some layers of a prompt take their share; the head is computed where the launch has it.
    - A slowdown beside the other kind is told by what both take of the memory and of the FLOP
      rate, and by their sizes (`Slowdowns`). It counts a side that runs as busy. Launches that
      share SMs, as in an impatient switch, are slowed by the SMs that they would need besides.

    Args:
        timings: Measured times, us.
        sizes: The model that they are of.
        profile: The device.
        gemms: Times of the model's GEMMs; None: their rooflines.

    Raises:
        ArgumentError: there are no timings.

    Source: MuxWise section 3.3 for interpolation of measured latencies and a slowdown of decode by
        cells; Bullet section 2.2.1 for waves of tiles. What is under it makes few cells enough.

    Example:
        >>> from smkern.latency import Size, TablePredictor
        >>> predictor = TablePredictor.load("qwen3-8b")
        >>> step = Size(batch=64, total_kv=64 * 2048)
        >>> predictor.alone_us(step, 16) > 1.5 * predictor.alone_us(step, 132)
        True
    """

    def __init__(
        self,
        timings: Mapping[Timing, float],
        sizes: ModelSizes,
        profile: Profile,
        gemms: GemmTimes | None = None,
    ) -> None:
        if not timings:
            raise ArgumentError("no timings: a predictor from a table needs one cell at least")
        self.sizes = sizes
        self.profile = profile
        self._count = len(timings)
        alone = {key: us for key, us in timings.items() if not key.beside_sms}
        beside = {key: us for key, us in timings.items() if key.beside_sms}
        self._roofline = roofline = Roofline(sizes, profile, gemms=gemms)
        self._steps = StepTimes(alone, roofline)
        self._prompts = PromptTimes(alone, roofline, self._steps)
        self._confidence = Confidence(alone)
        usage = Usage(self._steps, self._prompts, roofline, profile.info.num_sms)
        self._decode_beside = Slowdowns(self._slowed(beside, "decode"), usage.of)
        self._prefill_beside = Slowdowns(self._slowed(beside, "prefill"), usage.of)

    def __repr__(self) -> str:
        of = f"{self.sizes.num_layers} layers of {self.sizes.hidden_size}"
        return f"TablePredictor({self._count} timings of {of} on {self.profile.info.name})"

    def _slowed(self, beside: Mapping[Timing, float], kind: Kind) -> Iterator[tuple[Pair, float]]:
        """Slowdowns of cells that say what their neighbour was."""
        layers = self.sizes.num_layers
        for key, us in beside.items():
            sample = Sample.of(key, us, layers)
            if key.kind != kind or sample.beside is None or sample.beside.kind == kind:
                continue
            yield (
                _pair(sample.size, key.num_sms, sample.beside, key.beside_sms),
                us / self.alone_us(sample.size, key.num_sms),
            )

    @classmethod
    def load(cls, model: str = "qwen3-8b", gpu: str | None = None) -> TablePredictor:
        """From the table that smkern ships for a model; where it ships none, `smkern.predictor_for`
        tells from the nearest.

        Args:
            model: A preset's name, whatever the case.
            gpu: The GPU's name, "NVIDIA H200" or "h200"; None: the H200 that plans are made for
                without a GPU, whatever GPU is here.

        Raises:
            TableError: no table for that model on that GPU.
            ProfileError: no profile of that GPU.
        """
        return cls.read(find_shipped(model, DEFAULT if gpu is None else gpu))

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
        path = as_path("path", path)
        cells, sizes = read_timings(path)
        gpu = str(cells.meta.get("gpu", DEFAULT))
        if profile is None:
            profile = load_profile(gpu_folder(gpu))
        elif gpu_folder(gpu) != gpu_folder(profile.info.name):
            raise TableError(
                f"{path} was measured on {gpu!r}, and this is {profile.info.name!r}: measure here "
                "with smkern profile, or take a table of this GPU"
            )
        if (timed := cells.meta.get("kernels")) is not None:
            _warn_if_stale(str(path), str(timed), gpu, sizes)
        return cls(cells.cells, sizes, profile, gemms_in(path, cells))

    def for_model(
        self,
        config: ModelConfig | ModelSizes,
        profile: Profile | None = None,
        gemms: GemmTimes | None = None,
    ) -> TablePredictor:
        """For a model, or a GPU, without timings: its own rooflines, these times over them.

        Of launches of Qwen3-8B on an H100, told from an H200's by the H100's ceilings and times of
        GEMMs, the mean was 4.7% off, of Qwen3-14B's on an H200 from 8B's 5.0, of 32B's 6.0. Of
        Qwen3-8B's own on an H200 without CUTLASS's kernels, told from a table with some, 4.0.

        Args:
            config: The model. Of the same sizes, on the same device, without `gemms`: this
                predictor itself.
            profile: The device; None: the same.
            gemms: Times of the model's GEMMs there, as `smkern.latency.model_gemms` has them. None:
                what these took over their rooflines holds for its own.
        """
        sizes, profile = ModelSizes.of(config), profile or self.profile
        if gemms is None and sizes == self.sizes and profile == self.profile:
            return self
        other = copy(self)
        other.sizes, other.profile = sizes, profile
        here, there = profile.info, self.profile.info
        if here.capability != there.capability:
            other._confidence = self._confidence.told(MOST)
        elif (sizes, here.name, here.num_sms) != (self.sizes, there.name, there.num_sms):
            other._confidence = self._confidence.told(TOLD)
        like = None if gemms else self._roofline
        other._roofline = roofline = Roofline(sizes, profile, gemms=gemms, like=like)
        other._steps = self._steps.over(roofline)
        other._prompts = self._prompts.over(roofline, other._steps)
        usage = Usage(other._steps, other._prompts, roofline, profile.info.num_sms)
        other._decode_beside = self._decode_beside.seen_by(usage.of)
        other._prefill_beside = self._prefill_beside.seen_by(usage.of)
        return other

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it.

        Args:
            size: What it is made of; its `num_layers` are those of the predictor's model.
            num_sms: SMs of its place.

        Returns:
            Microseconds; 0 for a launch of nothing.

        Raises:
            ProfileError: no SMs, or more than the device has.
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

        Raises:
            ProfileError: as `alone_us`, of either place of a step beside prompts.
        """
        ratio = UNMEASURED_BESIDE
        slowdowns = self._prefill_beside if size.chunks else self._decode_beside
        if slowdowns and _is_pair(size, beside):
            ratio = slowdowns.at(_pair(size, num_sms, beside, beside_sms))
        return ratio * max(1.0, (num_sms + beside_sms) / self.profile.info.num_sms)

    def worst_us(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """The longest that a launch is expected to take beside another, us.

        `GUARD` times what is expected: of held-out decode steps beside prompts 98% (8B) and 94%
        (32B) took no longer.

        Args:
            size, num_sms, beside, beside_sms: As `slowdown` has them.
        """
        slowdown = self.slowdown(size, num_sms, beside, beside_sms)
        return GUARD * slowdown * self.alone_us(size, num_sms)

    def confidence(self, size: Size, num_sms: int) -> float:
        """The relative error to be expected of `alone_us`, by how far the nearest cell is, and by
        whose it is: more of another model or GPU, most of another architecture, which nobody tried.

        Args:
            size: The launch.
            num_sms: SMs of its place.

        Returns:
            0.03 for 3%. Not for a decision's time: it looks at all cells.
        """
        return self._confidence.error(size, num_sms)


@cache
def _warn_if_stale(path: str, timed: str, gpu: str, sizes: ModelSizes) -> None:
    """Say once where the model's kernels or tuned cells are not those that were timed."""
    if timed != (now := kernels_hash(gpu, sizes)):
        warnings.warn(
            f"{path} was measured with other kernels or tuned tables (smkern autotune's included) "
            f"than these (their stamp is {shown(timed)}, now it is {now!r}): predictions may be "
            "off; measure again with smkern profile",
            stacklevel=4,
        )


def _is_pair(one: Size, other: Size) -> bool:
    """Whether one is a decode step and the other prompts."""
    if one.chunks:
        one, other = other, one
    return bool(one.batch and not one.chunks and other.new_tokens and not other.batch)


def _pair(size: Size, num_sms: int, beside: Size, beside_sms: int) -> Pair:
    if size.chunks:
        return Pair.of(beside, beside_sms, size, num_sms)
    return Pair.of(size, num_sms, beside, beside_sms)
