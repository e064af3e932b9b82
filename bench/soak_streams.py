"""A client that keeps streams going for minutes, and hangs up on some of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from urllib.request import urlopen

from smkern.bench.http_streams import ask, until_up

HANGING = 10
"""One request of so many hangs up midway."""
BUSY = (
    "smkern_http_choices", "smkern_requests_decoding", "smkern_requests_prefilling",
    "smkern_requests_waiting",
)  # fmt: skip
SETTLE_S = 30.0
"""How long requests that hung up may take to leave the runtime."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what greedily follows it, when it is served alone."""

    prompt: list[int]
    reply: list[int]


@dataclass(slots=True)
class Soaked:
    """What the client saw.

    Attributes:
        requests, hangups, tokens: Counts.
        wrong: Requests with a token that is not the text's, or with too few or too many.
        rss_mib: Of the server's process, after a third of the time and at the end.
        metrics: Samples of `/metrics` once nothing runs any more, by `name{labels}`.
        took_s: How long requests came.
    """

    requests: int = 0
    hangups: int = 0
    tokens: int = 0
    wrong: int = 0
    rss_mib: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0


async def watch_soak(
    port: int, server: int, texts: Sequence[Text], streams: int, seconds: float
) -> Soaked:
    """Keep so many streams going."""
    await until_up(port)
    seen, draw, began = Soaked(), Random(6), perf_counter()

    async def stream() -> None:
        while perf_counter() < began + seconds:
            text = draw.choice(texts)
            hangs_up = seen.requests % HANGING == 0
            seen.requests += 1
            seen.hangups += hangs_up
            wanted = draw.randint(1, len(text.reply) - 1) if hangs_up else None
            tokens = await _one(port, text, wanted)
            seen.tokens += len(tokens)
            seen.wrong += not is_right(tokens, text.reply, wanted)
            if not seen.rss_mib and perf_counter() > began + seconds / 3:
                seen.rss_mib.append(rss_mib(server))

    await asyncio.gather(*(stream() for _ in range(streams)))
    seen.took_s = perf_counter() - began
    for _ in range(round(10 * SETTLE_S)):
        seen.metrics = samples(urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())
        if not any(seen.metrics.get(name) for name in BUSY):
            break
        await asyncio.sleep(0.1)
    seen.rss_mib.append(rss_mib(server))
    return seen


def is_right(tokens: list[int], reply: list[int], wanted: int | None) -> bool:
    """Whether tokens are the reply, or its beginning where the client left after `wanted`."""
    if wanted is None:
        return tokens == reply
    both = min(len(tokens), len(reply))
    return len(tokens) >= wanted and tokens[:both] == reply[:both]


async def _one(port: int, text: Text, wanted: int | None) -> list[int]:
    """Tokens of one response; with `wanted` the client leaves once it has so many."""
    length = len(text.reply) if wanted is None else 4 * len(text.reply)
    reader, writer = await ask(port, text.prompt, length)
    tokens: list[int] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            tokens += json.loads(line[6:])["choices"][0]["token_ids"]
        if line.startswith(b"data: [DONE]") or (wanted is not None and len(tokens) >= wanted):
            break
    writer.close()
    return tokens


def samples(text: str) -> dict[str, float]:
    """Prometheus text as `name{labels}` and values."""
    lines = re.findall(r"^(\w+(?:\{.*\})?) (\S+)\r?$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def wrong_metrics(seen: Soaked, before: dict[str, float]) -> dict[str, list[float]]:
    """Samples that are not what the client counted: what they say, and what they should."""
    expected = {
        "smkern_requests_total": seen.requests,
        'smkern_finished_total{reason="cancelled"}': seen.hangups,
        'smkern_finished_total{reason="length"}': seen.requests - seen.hangups,
        "smkern_http_hangups_total": seen.hangups,
        "smkern_http_choices": 0,
        'smkern_http_responses_total{path="/v1/completions",status="200"}': seen.requests,
    }
    told = {name: seen.metrics.get(name, 0.0) - before.get(name, 0.0) for name in expected}
    return {name: [told[name], value] for name, value in expected.items() if told[name] != value}


def rss_mib(pid: int) -> float:
    """Memory of a process that is in use."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
