"""vLLM as what serves replays: requests given to it as they come, tokens as it hands them out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch

import smkern
from smkern.bench.engines.cases import TokenBudget
from smkern.bench.engines.vllm_engine import Vllm
from smkern.bench.power import PowerMeter, power_meter
from smkern.bench.replay.gpu import RealSession
from smkern.latency.nearest import predictor_for
from smkern.latency.predictor import Predictor
from smkern.models import preset
from smkern.replay import Served
from smkern.runtime.handle import Output


class VllmServer:
    """Serves replays on one vLLM, whose token budget is the "policy" of a session.

    Args:
        model: A preset's name.
        max_context: Tokens of a request.
        kv_tokens: Size of its cache.
        options: What else `vllm.LLM` takes.
    """

    def __init__(self, model: str, max_context: int, kv_tokens: int, **options: Any) -> None:
        config = preset(model)
        self.name = f"{model} in vLLM"
        # By it a search begins at the same rate as smkern's.
        self.predictor: Predictor = predictor_for(config, sms=())
        self.num_sms, self.num_layers = smkern.device_info().num_sms, config.num_layers
        self.kv_tokens, self.max_context = kv_tokens, max_context
        self._vocab = config.vocab_size
        self._vllm = Vllm(model, max_context, kv_tokens, **options)
        self._meter = power_meter(torch.cuda.current_device())

    def open(self, policy: Any, *, keep: bool = False) -> VllmSession:
        """A session under a `TokenBudget`, the cache empty."""
        budget: TokenBudget = policy
        self._vllm.set_token_budget(budget.tokens)
        self._vllm.forget_prefixes()
        return VllmSession(self._vllm, self._vocab, self._meter)


class VllmSession(RealSession):
    """One replay, in real time."""

    def __init__(self, vllm: Vllm, vocab_size: int, meter: PowerMeter | None) -> None:
        super().__init__(vocab_size, meter)
        self._vllm = vllm
        self.mux: Any = Requests(vllm, self.now_us)

    def now_us(self) -> float:
        return 1e6 * time.perf_counter()

    def close(self, served: Served, live: Sequence[int]) -> None:
        """Abort what still runs."""
        served.about = self._readings.stop()
        self._vllm.drain()


@dataclass(frozen=True, slots=True)
class Coming:
    """A request that has not come yet, and its number."""

    at_us: float
    id: int
    ids: Sequence[int]
    new: int


class Serving(Protocol):
    """What `Requests` asks of vLLM."""

    @property
    def is_busy(self) -> bool: ...
    def add(self, name: str, ids: Sequence[int], new: int) -> None: ...
    def step(self) -> list[Any]: ...


class Requests:
    """What a replay asks of a runtime, on vLLM.

    Args:
        now_us: The clock of arrivals.
    """

    def __init__(self, vllm: Serving, now_us: Callable[[], float]) -> None:
        self._vllm, self._now_us = vllm, now_us
        self._coming: deque[Coming] = deque()
        self._numbers = count()

    def submit(
        self, ids: Sequence[int], params: Any, *, arrival_us: float, deadline_ms: float
    ) -> Coming:
        """Remember a request until it comes; vLLM knows no deadlines.

        They are submitted in the order of their arrivals.
        """
        coming = Coming(arrival_us, next(self._numbers), ids, params.max_new_tokens)
        self._coming.append(coming)
        return coming

    def run(self) -> Iterator[Output]:
        """Tokens as a step hands them out, and None behind a request's last one.

        A request that comes during a step is given to vLLM behind it: as its next step is then
        begun, it waits for one more than from a thread of its own.
        """
        vllm = self._vllm
        while self._coming or vllm.is_busy:
            while self._coming and self._coming[0].at_us <= self._now_us():
                came = self._coming.popleft()
                vllm.add(str(came.id), came.ids, came.new)
            if not vllm.is_busy:
                time.sleep(1e-6 * max(self._coming[0].at_us - self._now_us(), 0.0))
                continue
            for found in vllm.step():
                number = int(found.request_id)
                for token in found.outputs[0].token_ids:
                    yield Output(number, token)
                if found.finished:
                    yield Output(number, None)
