"""A simulated GPU that serves traces: no GPU, no torch, times by a predictor."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from smkern.errors import ArgumentError
from smkern.limits import as_float
from smkern.profile import DEFAULT, load_profile
from smkern.replay.records import Served
from smkern.replay.sizes import Sizes, sizes_for
from smkern.replay.trace import Trace
from smkern.replay.varied import SPREAD, Varied
from smkern.runtime.step_log import StepLog

if TYPE_CHECKING:
    from smkern.latency.predictor import Predictor
    from smkern.models.config import ModelConfig
    from smkern.policies import Policy
    from smkern.runtime.multiplexer import Multiplexer


KEPT = 200_000
"""Launches that are kept for pictures: twenty minutes or so."""
DECODE_LAUNCH_US, PREFILL_LAUNCH_US = 70.0, 200.0
"""Host time of a decode graph and of a layer of prompts, on hosts of H200s: while it launches
layers, no token is handed out."""


class SimServer:
    """Serves replays on a simulated device, each on one of its own.

    Args:
        model: A preset's name, or a configuration.
        gpu: The GPU's name, as its tables have it: "h200", "h100-80gb-hbm3".
        predictor: How long launches take. None: the model's table on that GPU, else the nearest.
        sizes: What it holds. None: `sizes_for` the model and the GPU.
        decode_launch_us, prefill_launch_us: Host time of a decode launch and of a layer of prompts.
        spread: Of launches' times around what is predicted; see `Varied`. 0: they take just that.
        pace: How many times as long as predicted launches take: chips of one kind differ by some
            percent. Policies go by what is predicted, as on a GPU.

    Attributes:
        name, num_sms, num_layers, kv_tokens, max_context, predictor, config, sizes: As given, or
            made.

    Raises:
        ConfigError, ProfileError: no such model, or no such GPU.
    """

    def __init__(
        self,
        model: str | ModelConfig = "qwen3-8b",
        *,
        gpu: str = DEFAULT,
        predictor: Predictor | None = None,
        sizes: Sizes | None = None,
        decode_launch_us: float = DECODE_LAUNCH_US,
        prefill_launch_us: float = PREFILL_LAUNCH_US,
        spread: float = SPREAD,
        pace: float = 1.0,
    ) -> None:
        from smkern.latency.nearest import predictor_for
        from smkern.models.config import ModelConfig
        from smkern.models.presets import preset

        self.config = model if isinstance(model, ModelConfig) else preset(model)
        if predictor is None:
            predictor = predictor_for(self.config, gpu, sms=())
        self.predictor = predictor
        self.sizes = sizes_for(self.config, load_profile(gpu).info) if sizes is None else sizes
        self._launch_us = decode_launch_us, prefill_launch_us
        self._spread = as_float("spread", spread)
        if not 0 <= self._spread <= 1:
            raise ArgumentError(f"spread={spread}: give a share of a launch's time, 0 to 1")
        self._pace = as_float("pace", pace)
        if not 0 < self._pace < inf:
            raise ArgumentError(f"pace={pace}: give a ratio of times above 0; 1: as predicted")
        named = model if isinstance(model, str) else "a model"
        self.name = f"{named}, simulated" + (f" on {gpu}" if gpu != DEFAULT else "")
        self.num_sms, self.num_layers = self.sizes.num_sms, self.config.num_layers
        self.kv_tokens = self.sizes.kv_tokens
        self.max_context = self.sizes.max_context

    def open(self, policy: Policy, *, keep: bool = False) -> SimSession:
        """A session on a device of its own."""
        predictor: Predictor = self.predictor
        if self._spread or self._pace != 1.0:
            predictor = Varied(predictor, self._spread, pace=self._pace)
        return SimSession(self, predictor, policy, self._launch_us, keep)


class SimSession:
    """One replay on a simulated device."""

    def __init__(
        self,
        server: SimServer,
        predictor: Predictor,
        policy: Policy,
        launch_us: tuple[float, float],
        keep: bool,
    ) -> None:
        from smkern.runtime.multiplexer import Multiplexer
        from smkern.runtime.sim.device import SimDevice
        from smkern.runtime.sim.executor import SimExecutor
        from smkern.runtime.timeline.timeline import Timeline

        sizes = server.sizes
        self._device = SimDevice(
            sizes.num_sms, sizes.rungs, predictor, decode_launch_us=launch_us[0],
            prefill_launch_us=launch_us[1],
        )  # fmt: skip
        executor = SimExecutor(
            server.config, self._device, num_pages=sizes.num_pages, page_size=sizes.page_size,
            max_running=sizes.max_running, max_prefill=sizes.max_prefill,
            max_tokens=sizes.max_tokens, max_context=sizes.max_context, checks=False,
        )  # fmt: skip
        timeline = Timeline(sizes.num_sms, capacity=KEPT) if keep else Timeline.off(sizes.num_sms)
        self.log: StepLog | None = StepLog()
        self.mux: Multiplexer = Multiplexer(
            executor, policy=policy, timeline=timeline, log=self.log
        )
        self._keep = keep
        self._page_size = sizes.page_size

    def lead_s(self, trace: Trace) -> float:
        return 0.0

    def now_us(self) -> float:
        return self._device.now_us()

    def prompt(self, trace: Trace, number: int) -> Any:
        from smkern.kv import VirtualTokens

        request, size = trace.requests[number], trace.block_tokens
        if size % self._page_size:  # one block at most: what fills whole pages of it is found again
            size = max(size // self._page_size, 1) * self._page_size
        return VirtualTokens(request.prompt_tokens, request.blocks, block_tokens=size)

    def close(self, served: Served, live: Sequence[int]) -> None:
        if not self._keep:
            return
        served.stats = self.mux.stats()
        served.split = split_of(self.mux.timeline.trace().choices)


def split_of(choices: Any) -> list[tuple[float, int | None]]:
    """(seconds, SMs of decode; None: no split) whenever a decision changed it."""
    found: list[tuple[float, int | None]] = []
    for choice in choices:
        if not found or found[-1][1] != choice.rung:
            found.append((1e-6 * choice.at_us, choice.rung))
    return found
