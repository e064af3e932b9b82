"""A server on a port of this machine: uvicorn in one thread, the engine in another."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import Pipe
from typing import Any

import httpx2
import torch
import uvicorn
from openai import AsyncOpenAI, OpenAI

from smkern import serve
from smkern.models import Decoder, ModelConfig, Weights, preset
from smkern.models.tokenizer import Tokenizer
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from smkern.runtime.sim.rates import ConstantRates
from smkern.runtime.sim.tokens import TokenSource
from smkern.server.app import Limits, Server
from smkern.server.client import EngineClient
from smkern.server.engine import serve_connection
from smkern.server.messages import Ready
from tests.models.generation import Letters, tiny
from tests.runtime.alone import pool_of

NAME = "tiny"
PAGE = 16


class PacedDevice(SimDevice):
    """A simulated device whose clock stands still for `pause_s` of ours at each wait."""

    pause_s = 0.0

    def wait(self, *given: Any) -> None:
        time.sleep(self.pause_s)
        super().wait(*given)


class Chatting(Letters):
    """Letters with a chat template: the contents, one behind the other, then `ending` or "z"."""

    chat_template = "yes"

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **variables: Any,
    ) -> str:
        assert add_generation_prompt
        assert not tokenize
        if any(message["role"] == "nobody" for message in conversation):
            raise ValueError("roles are user and assistant")
        said = "".join(message["content"] for message in conversation)
        return said + str(variables.get("ending", "z"))

    def encode(self, text: str, **options: Any) -> list[int]:
        return super().encode(text)


@dataclass
class Running:
    """A server that runs.

    Attributes:
        url: Where it is.
        mux: The runtime, for looking at.
    """

    url: str
    mux: Multiplexer
    key: str = "none"
    _options: dict[str, Any] = field(default_factory=lambda: {"max_retries": 0, "timeout": 60})

    @cached_property
    def http(self) -> httpx2.Client:
        """A client made once: each has an SSL context of 30 ms, whatever it speaks."""
        return httpx2.Client(base_url=self.url, timeout=60)

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.key, **self._options)

    @property
    def async_client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, **self._options)

    @property
    def pool(self) -> Any:
        return self.mux._executor.pool

    def settle(self) -> None:
        """Wait until the engine has nothing left to do."""
        while not self.mux.is_idle or self.pool.requests:
            time.sleep(0.005)


@contextmanager
def running(
    open_mux: Callable[[], Multiplexer],
    *,
    tokenizer: Tokenizer | None = None,
    limits: Limits | None = None,
) -> Iterator[Running]:
    """A server over a runtime that the engine's thread opens; all its pages come back, but from a
    device that hangs."""
    ours, theirs = Pipe()
    opened: list[Multiplexer] = []

    @contextmanager
    def open_runtime() -> Iterator[tuple[Multiplexer, Ready]]:
        mux = open_mux()
        opened.append(mux)
        executor = mux._executor
        held = executor.pool.num_pages * executor.pool.page_size
        try:
            yield mux, Ready(executor.max_context, held, executor.config.vocab_size)
        finally:
            mux.close(force=True)

    engine = threading.Thread(target=serve_connection, args=(theirs, open_runtime))
    engine.start()
    ready = ours.recv()
    assert isinstance(ready, Ready), ready
    server = Server(EngineClient(ours), ready, NAME, tokenizer, limits)
    place = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        server.app, log_level="critical", lifespan="on", timeout_graceful_shutdown=5
    )
    http = uvicorn.Server(config)
    web = threading.Thread(target=http.run, kwargs={"sockets": [place]})
    web.start()
    try:
        yield Running(f"http://127.0.0.1:{place.getsockname()[1]}", opened[0])
    finally:
        http.should_exit = True
        web.join()
        engine.join()
        ours.close()
        place.close()
    executor = opened[0]._executor
    executor.pool.poll()
    executor.pool.check()
    if not getattr(executor.device, "has_failed", False):
        assert executor.pool.usage.held == 0


def simulated(
    *, pause_s: float = 0.0, faults: dict[int, Any] | None = None, **options: Any
) -> Multiplexer:
    """A runtime without a model, whose tokens are `tokens_of`."""
    device = PacedDevice(132, (16, 32, 64), ConstantRates(), faults=faults)
    device.pause_s = pause_s
    executor = SimExecutor(SIMULATED, device, num_pages=40_000, page_size=PAGE, max_running=128)
    return Multiplexer(executor, **options)


SIMULATED = preset("llama-3.1-8b")


def tokens_of(prompt: list[int], seed: int, count: int) -> list[int]:
    """What a simulated request draws."""
    source = TokenSource(SIMULATED, 0.0)
    key = source.key(seed, prompt)
    return [source.token(key, len(prompt) + at) for at in range(count)]


def with_tensors(config: ModelConfig | None = None, **options: Any) -> Multiplexer:
    """A runtime of a tiny model on CPU tensors."""
    config = tiny() if config is None else config
    pool = pool_of(config, 64, PAGE)
    torch.set_num_threads(1)
    given: dict[str, Any] = {"max_running": 8, "max_prefill": 4, "max_tokens": 64, "seed": 5}
    return serve(Decoder(config, Weights.random(config, 3)), pool, **given | options)


def run_async(main: Any) -> Any:
    """The result of a coroutine."""
    return asyncio.run(main)
