"""The server's process, and streams as a client's sees them: when each token came."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from smkern.bench.runtime.figures import common

START_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")

Watch = Callable[..., Coroutine[Any, Any, Any]]
"""The body of a client: of a port, the server's process, and a load."""


@dataclass(slots=True)
class Seen:
    """What came of some streams that ran side by side.

    Attributes:
        times_s: By stream, when each of its tokens came.
        events: Events that held them.
        cpu_s: CPU time of the server's process while they ran.
        took_s: How long they ran.
    """

    times_s: list[list[float]] = field(default_factory=list)
    events: int = 0
    cpu_s: float = 0.0
    took_s: float = 0.0

    def gaps_ms(self) -> list[float]:
        """Time between two tokens of a stream, ms, while all streams ran."""
        begin, end = common(*self.times_s, settle=0.0)
        return [
            1e3 * (after - before)
            for times in self.times_s
            for before, after in pairwise(times)
            if begin <= before and after <= end
        ]


def run_front(connection: Connection, ready: Any, port: int) -> None:
    """The server's process, as `smkern serve` has it: neither torch nor a model is loaded."""
    from smkern.server.app import Server
    from smkern.server.client import EngineClient
    from smkern.server.command import bound, run_server

    client = EngineClient(connection)
    with bound("127.0.0.1", port) as place:
        run_server(Server(client, ready, "bench").app, client, place, 30)


def behind_front(mux: Any, ready: Any, watch: Watch, *load: Any) -> Any:
    """Serve a client process by way of the server's, as `smkern serve` does.

    Args:
        mux: The runtime, in this process.
        ready: What the server is told of it.
        watch: What the client does, in a process.
        load: What it asks for.

    Returns:
        The client's answer.
    """
    from smkern.server.engine import EngineLoop  # the processes need nothing of it

    spawn = multiprocessing.get_context("spawn")
    port, (ours, theirs), (answer, told) = free_port(), spawn.Pipe(), spawn.Pipe(duplex=False)
    server = spawn.Process(target=run_front, args=(theirs, ready, port))
    server.start()
    theirs.close()
    client = spawn.Process(target=run_client, args=(watch, port, server.pid, load, told))
    client.start()
    told.close()
    EngineLoop(mux, ours).run()  # until the client has stopped the server
    seen = answer.recv()
    client.join()
    server.join()
    ours.close()
    return seen


def run_client(
    watch: Watch, port: int, server: int, load: Sequence[Any], answer: Connection
) -> None:
    """The client's process: watch, stop the server, tell what came."""
    seen = asyncio.run(watch(port, server, *load))
    os.kill(server, signal.SIGTERM)  # the engine reads the answer once that has ended
    answer.send(seen)


async def watch_streams(port: int, server: int, prompts: Sequence[list[int]], tokens: int) -> Seen:
    """Stream all prompts at a time, so many new tokens of each.

    It reads bytes as they come and looks into them afterwards: what is measured is the server.
    """
    await until_up(port)
    cpu_s, began = _cpu_s(server), perf_counter()
    arrived = await asyncio.gather(*(_one(port, prompt, tokens) for prompt in prompts))
    seen = Seen(cpu_s=_cpu_s(server) - cpu_s, took_s=perf_counter() - began)
    for parts in arrived:
        times: list[float] = []
        for at, line in parts:
            if line.startswith(b"data: {"):
                seen.events += 1
                times += [at] * len(json.loads(line[6:])["choices"][0]["token_ids"])
        seen.times_s.append(times)
    return seen


async def ask(
    port: int, prompt: list[int], tokens: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which a stream of so many greedy tokens was asked for."""
    body = json.dumps(
        {
            "model": "bench", "prompt": prompt, "max_tokens": tokens, "stream": True,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }
    ).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def _one(port: int, prompt: list[int], tokens: int) -> list[tuple[float, bytes]]:
    """Lines of one response, and when they came."""
    reader, writer = await ask(port, prompt, tokens)
    lines = []
    while True:
        line = await reader.readline()
        lines.append((perf_counter(), line))
        if not line or line.startswith(b"data: [DONE]"):
            writer.close()
            return lines


async def until_up(port: int) -> None:
    last = perf_counter() + START_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if perf_counter() > last:
                raise
            await asyncio.sleep(0.05)
            continue
        writer.close()
        return


def _cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        return int(place.getsockname()[1])
