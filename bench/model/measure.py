"""Cells of one model: decode steps alone and beside a prompt, the prompt alone, its operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from smkern.bench.cells import ceiling_of, failed_cell, our_head
from smkern.bench.contention import Load, time_together
from smkern.bench.model.cases import DecodeCase, PrefillCase, limit_of
from smkern.bench.model.floor import beside_floor_us, floor_us, kernel_floor_us
from smkern.bench.model.host_cost import layer_launch_us
from smkern.bench.model.model import DecodeLoop, Model, layer_call
from smkern.bench.model.operators import operator_calls
from smkern.bench.model.prompt import PromptTimes, time_prompt
from smkern.bench.model.rows import DECODE, KERNEL, LAUNCH, PREFILL
from smkern.bench.power import PowerMeter
from smkern.bench.rows import Cell
from smkern.latency.cost import Kernel, kernels_of, total_bytes, total_flops
from smkern.measure.partitions import Place
from smkern.measure.timing import (
    Case,
    Timing,
    run_eagerly,
    time_interleaved,
    try_eagerly,
)
from smkern.models import Step
from smkern.profile import Profile

ONCE = ("plan", "embedding", "final_norm", "head", "sample")
"""Operators that a step launches once; the others once a layer."""
ONCE_CALLS = 4
SLOWER = 1.3
"""First guess of a step's time over its floor."""
OVER_ALONE = 1.2
"""First guess of a step's time beside a prompt over its time alone."""


@dataclass(slots=True)
class Measurer:
    """Measures one model in places.

    Args:
        meter: reads clock and power while the device is busy.
        rounds: windows in which a step alone is timed.
    """

    model: Model
    profile: Profile
    meter: PowerMeter
    rounds: int = 3

    def decode(self, case: DecodeCase, place: Place, other: Place | None) -> Iterator[Cell]:
        """The step alone; and with `other`, the complement, beside a prompt, and that prompt."""
        with closing(self.model.decode(case.batch, place)) as loop:
            alone = self._alone(loop, self._floor_us(case, place) * SLOWER)
            yield self._decode_cell(case, place, alone)
            if other is not None:
                yield from self._beside_or_why(case, loop, alone.us_median, other)

    def _alone(self, loop: DecodeLoop, expected_us: float) -> Timing:
        load = Load(loop.call, loop.place.stream, expected_us)
        found: list[float] = []
        for _ in range(self.rounds):
            found += time_together({"decode": load}, while_busy=self.meter)["decode"].us_all
        return Timing(tuple(found))

    def _beside_or_why(
        self, case: DecodeCase, loop: DecodeLoop, alone_us: float, other: Place
    ) -> Iterator[Cell]:
        """What fails beside a prompt leaves the cell of the step alone as it is."""
        case = replace(case, beside=self.model.plan.beside_decode)
        try:
            yield from self._beside(case, loop, alone_us, other)
        except Exception as error:  # noqa: BLE001  a cell that cannot be measured says why
            yield our_head(DECODE, case.about, loop.place) | failed_cell(error)

    def _beside(
        self, case: DecodeCase, loop: DecodeLoop, alone_us: float, other: Place
    ) -> Iterator[Cell]:
        """Layers of the prompt on `other`, over and over; of embedding, the last layer and the head
        it is taken that they are as long as a layer."""
        prompt = self.model.plan.prompt
        step = planned(self.model.prefill_step(), other)
        call, layers = layer_call(self.model, step), self.model.config.num_layers
        run_eagerly(call, other.stream)
        layer_us = self._floor_us(prompt, other) * SLOWER / layers
        loads = {
            "decode": Load(loop.call, loop.place.stream, OVER_ALONE * alone_us),
            "prefill": Load(call, other.stream, layer_us),
        }
        timings = time_together(loads, while_busy=self.meter)
        for name in loads:
            if name not in timings:
                raise ValueError(f"no call of {name} lay inside the time that both were busy")
        floor = beside_floor_us(self._kernels(case), self.profile, loop.place.num_sms)
        cell = self._decode_cell(case, loop.place, timings["decode"])
        yield cell | {"fraction_of_beside_floor": round(floor / cell["us"], 4)}
        whole = Timing(tuple(us * layers for us in timings["prefill"].us_all))
        prompt = replace(prompt, beside=self.model.plan.beside_prefill(case.batch))
        cell = self._prefill_cell(prompt, other, whole)
        yield cell | {"beside_sms": loop.place.num_sms, "group_sms": loop.place.num_sms}

    def prefill(self, case: PrefillCase, place: Place, chip_per_sm: float | None) -> Iterator[Cell]:
        """The prompts alone, and their GEMMs by themselves in between.

        Args:
            chip_per_sm: the whole chip's TFLOP/s an SM in this run.
        """
        step = planned(self.model.prefill_step(case.batch), place)
        times: PromptTimes = time_prompt(self.model, step, place, self.meter)
        cell = self._prefill_cell(case, place, times.whole)
        if self.model.config.moe is None:  # experts' products are not among those timed
            gemm_tflops = times.gemm_flops / times.gemms.us_median / 1e6
            cell["gemm_tflops"] = round(gemm_tflops, 1)
            cell["of_gemm"] = round(cell["tflops"] / gemm_tflops, 4)
        per_sm = cell["tflops_per_sm"] if place.mode == "full" else chip_per_sm
        if per_sm:
            cell["of_chip"] = round(cell["tflops_per_sm"] / per_sm, 4)
        yield cell

    def launch(self, case: DecodeCase, place: Place) -> Iterator[Cell]:
        """Host time of launching one layer of a step."""
        with closing(self.model.decode(case.batch, place)) as loop, torch.cuda.stream(place.stream):
            us = layer_launch_us(self.model.decoder, loop.step)
        head = our_head(LAUNCH, case.about, place)
        yield head | {"value": round(us, 2), "unit": "us"}

    def breakdown(self, case: DecodeCase, place: Place) -> Iterator[Cell]:
        """Every operator of the step in a graph of its own, each layer's weights in turn."""
        kernels = {kernel.name: kernel for kernel in self._kernels(case)}
        layers = self.model.config.num_layers
        errors: dict[str, str] = {}
        with closing(self.model.decode(case.batch, place)) as loop:
            calls = operator_calls(self.model, loop)
            cases = {}
            for name, call in calls.items():
                if (message := try_eagerly(call, place.stream)) is not None:
                    errors[name] = message
                    continue
                count = ONCE_CALLS if name in ONCE else layers
                cases[name] = Case(call, place.stream, count)
            timings = time_interleaved(cases, rounds=5, while_busy=self.meter, errors=errors)
        for name in calls:
            yield self._kernel_cell(case, place, name, kernels, timings.get(name), errors)

    def _kernel_cell(
        self,
        case: DecodeCase,
        place: Place,
        name: str,
        kernels: Mapping[str, Kernel],
        timing: Timing | None,
        errors: Mapping[str, str],
    ) -> Cell:
        cell = our_head(KERNEL, {**case.about, "kernel": name}, place)
        if timing is None:
            return cell | failed_cell(errors.get(name, "not measured"))
        kernel = kernels.get(name, Kernel(name, 0, 0))
        floor = kernel_floor_us(kernel, self._tbps(place), place.num_sms)
        count = 1 if name in ONCE else self.model.config.num_layers
        return cell | {
            "us": round(timing.us_median, 3),
            "floor_us": round(floor, 3),
            "count": count,
            "noise": round(timing.noise, 4),
        }

    def _kernels(self, case: DecodeCase | PrefillCase) -> tuple[Kernel, ...]:
        l2_bytes = self.profile.info.l2_bytes
        cache = 1 if self.model.plan.fp8_cache else 2
        return kernels_of(
            self.model.config, case.forward.load, l2_bytes=l2_bytes, cache_bytes=cache
        )

    def _tbps(self, place: Place) -> float:
        return ceiling_of(self.profile, place.budget, place.placement).tbps

    def _floor_us(self, case: DecodeCase | PrefillCase, place: Place) -> float:
        return floor_us(self._kernels(case), self._tbps(place), place.num_sms)

    def _figures(self, case: DecodeCase | PrefillCase, place: Place, timing: Timing) -> Cell:
        """What both kinds of cells have."""
        us, floor, kernels = timing.us_median, self._floor_us(case, place), self._kernels(case)
        clock, watts = self.meter.last
        return {
            "us": round(us, 2),
            "floor_us": round(floor, 2),
            "fraction_of_ceiling": round(floor / us, 4),
            "over_floor": round(us / floor, 4),
            "noise": round(timing.noise, 4),
            "tokens_per_ms": round(1e3 * case.forward.tokens / us, 3),
            "tbps": round(total_bytes(kernels) / us / 1e6, 4),
            "tflops": round(total_flops(kernels) / us / 1e6, 2),
            "sm_mhz": clock,
            "watts": watts,
        }

    def _decode_cell(self, case: DecodeCase, place: Place, timing: Timing) -> Cell:
        cell = our_head(DECODE, case.about, place) | self._figures(case, place, timing)
        return cell | {"limit": limit_of(place.num_sms, case.batch)}

    def _prefill_cell(self, case: PrefillCase, place: Place, timing: Timing) -> Cell:
        cell = our_head(PREFILL, case.about, place) | self._figures(case, place, timing)
        return cell | {"tflops_per_sm": round(cell["tflops"] / place.num_sms, 4)}


def planned(step: Step, place: Place) -> Step:
    """The step with a plan for a place's budget, awaited."""
    torch.cuda.synchronize()  # its lengths were made on another stream
    with torch.cuda.stream(place.stream):
        step = step.planned()
    torch.cuda.synchronize()
    return step
