"""A model on the GPU that serves replays one after another: warmed up and captured once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import smkern
from smkern.bench.power import PowerMeter, power_meter
from smkern.bench.replay.cases import RUNGS, sizes_of
from smkern.bench.runtime.workload import PAGE_SIZE, open_executor
from smkern.bench.runtime.workload import Sizes as ExecutorSizes
from smkern.garbage import seldom_collected
from smkern.latency.nearest import places_of, predictor_for
from smkern.measure.provenance import chip
from smkern.replay import Served, Sizes, Trace
from smkern.replay.prompts import token_ids
from smkern.replay.simulated import KEPT, split_of
from smkern.runtime.step_log import StepLog
from smkern.runtime.timeline.trace import predicted

if TYPE_CHECKING:
    from smkern.latency.predictor import Predictor
    from smkern.policies import Policy
    from smkern.runtime import ModelExecutor
    from smkern.runtime.timeline.trace import Span

CONTEXTS = (2048, 8192)
"""Keys that graphs are captured for, beside the longest context."""
METER_S = 0.5
WHOLE = "whole"
"""What launches on the whole device are called together, of whatever kind."""
SUBMIT_S = 2e-6
"""Host time that a prompt's token takes until it is submitted, about three times what it does."""


class GpuServer:
    """Serves replays on an executor of the GPU, each under a runtime of its own.

    Args:
        model: Its name, for tables.
        executor: Idle, warmed up and captured.
        meter: Reads the chip's clock and power; None: nothing does.
    """

    def __init__(
        self, model: str, executor: ModelExecutor, predictor: Predictor, meter: PowerMeter | None
    ) -> None:
        self.name = f"{model} on the GPU"
        self.predictor = predictor
        self.num_sms = executor.device.num_sms
        self.num_layers = executor.config.num_layers
        self.kv_tokens = executor.pool.num_pages * executor.pool.page_size
        self.max_context = executor.max_context
        self._executor = executor
        self._meter = meter

    def open(self, policy: Policy, *, keep: bool = False) -> GpuSession:
        """A runtime of its own over the same executor, whose cache is empty."""
        self._executor.pool.forget_prefixes()
        return GpuSession(self._executor, policy, self._meter, self.predictor)


class RealSession:
    """What replays in real time share: prompts of random tokens, made and submitted beforehand.

    Args:
        vocab_size: Of the model.
        meter: Reads the chip's clock and power; None: nothing does.
    """

    def __init__(self, vocab_size: int, meter: PowerMeter | None) -> None:
        self.log: StepLog | None = None
        self._vocab = vocab_size
        self._readings = Readings(meter)

    def lead_s(self, trace: Trace) -> float:
        """Time in which all prompts are made and submitted."""
        return 0.5 + SUBMIT_S * sum(request.prompt_tokens for request in trace.requests)

    def prompt(self, trace: Trace, number: int) -> list[int]:
        return token_ids(trace, number, self._vocab)


class GpuSession(RealSession):
    """One replay on the GPU, in real time."""

    def __init__(
        self,
        executor: ModelExecutor,
        policy: Policy,
        meter: PowerMeter | None,
        predictor: Predictor,
    ) -> None:
        super().__init__(executor.config.vocab_size, meter)
        self._predictor = predictor
        device = executor.device
        timeline = smkern.Timeline(device.num_sms, clock=device.now_us, capacity=KEPT)
        self.mux = smkern.Multiplexer(executor, policy=policy, timeline=timeline)
        self._device = device
        self._before = smkern.counters().compilations
        self._missed = set(executor.graphs.missed)
        self._executor = executor

    def now_us(self) -> float:
        return self._device.now_us()

    def close(self, served: Served, live: Sequence[int]) -> None:
        """Cancel what still runs, and wait until the device is idle."""
        served.stats = self.mux.stats()
        trace = self.mux.timeline.trace()
        paces = paces_of(trace.spans, self._predictor, self._device.num_sms)
        served.split = split_of(trace.choices)
        missed = set(self._executor.graphs.missed) - self._missed
        served.about = self._readings.stop() | {
            "compiled": smkern.counters().compilations - self._before,
            "graphs_missed": len(missed),
            "errors": len(self.mux.errors),
            **chip(),
            "pace": paces[WHOLE][1] if WHOLE in paces else None,
            "paces": paces,
        }
        for id in live:
            self.mux.cancel(id)
        for _ in self.mux.run():
            pass
        self._executor.synchronize()


def paces_of(
    spans: Iterable[Span], predictor: Predictor, num_sms: int
) -> dict[str, tuple[int, float]]:
    """How many launches there were, and how many times as long as predicted all of them took:
    those on the whole device, "whole", and by kind, on the whole device and on a side of a split.
    """
    sums: dict[str, tuple[int, float, float]] = {}
    for span in predicted(spans, predictor):
        if span.size is None or not span.predicted_us or not span.is_over:
            continue
        kind = span.size.kind
        is_whole = span.place.num_sms == num_sms
        for name in (kind, WHOLE) if is_whole else (f"{kind}, split",):
            launches, took_us, told_us = sums.get(name, (0, 0.0, 0.0))
            sums[name] = launches + 1, took_us + span.duration_us, told_us + span.predicted_us
    return {name: (n, round(took / told, 3)) for name, (n, took, told) in sorted(sums.items())}


class Readings:
    """Clock and power of the chip while something runs, by a thread of its own."""

    def __init__(self, meter: PowerMeter | None) -> None:
        self._meter = meter
        self._clocks: list[float] = []
        self._watts: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        if meter is not None:
            self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Medians so far, MHz and W; None where nothing was read."""
        self._over.set()
        if self._meter is not None:
            self._thread.join()
        return {
            "sm_mhz": round(median(self._clocks)) if self._clocks else None,
            "watts": round(median(self._watts)) if self._watts else None,
        }

    def _read(self) -> None:
        assert self._meter is not None
        while not self._over.wait(METER_S):
            self._meter()
            clock, watts = self._meter.last
            if clock is not None and watts is not None:
                self._clocks.append(clock)
                self._watts.append(watts)


@contextmanager
def open_server(
    model: str,
    rungs: tuple[int, ...] = RUNGS,
    say: Callable[[str], None] = print,
    *,
    sizes: Sizes | None = None,
    layers: int | None = None,
    predictor: Predictor | None = None,
) -> Iterator[GpuServer]:
    """A model of random weights on the GPU that is here, ready to serve.

    Args:
        model: A preset's name.
        rungs: SMs of the decode side; policies are offered these alone.
        say: Told how far it is.
        sizes: What it holds, the rungs included. None: what replays of the model hold.
        layers: Layers of it, the first ones. None: all.
        predictor: Prices launches. None: the nearest shipped table.
    """
    from smkern.models import Weights
    from smkern.models.presets import preset

    config = preset(model)
    if layers is not None:
        config = config.replace(num_layers=layers)
    info = smkern.device_info()
    if predictor is None:
        predictor = predictor_for(config, sms=places_of(rungs, info.num_sms))
    weights = Weights.random(config, device="cuda")
    sizes = sizes_of(model, info.name, rungs) if sizes is None else sizes
    began = time.monotonic()
    held = ExecutorSizes(
        sizes.rungs, max_running=sizes.max_running, max_prefill=sizes.max_prefill,
        max_tokens=sizes.max_tokens, max_context=sizes.max_context, reuse=True,
        num_pages=sizes.kv_tokens // PAGE_SIZE,
    )  # fmt: skip
    with open_executor(weights, held) as executor:
        say(f"compiled what it launches, {time.monotonic() - began:.0f} s")
        executor.warm()
        count = executor.capture(None, contexts=[*CONTEXTS, held.max_context])
        say(f"captured {count} graphs, {time.monotonic() - began:.0f} s")
        with seldom_collected():
            yield GpuServer(model, executor, predictor, power_meter())
