"""Many streams at a time, some of whose clients hang up: no token is lost, mixed or drawn twice."""

from __future__ import annotations

import asyncio
import re
from itertools import count
from multiprocessing import Pipe
from random import Random

import httpx2
import pytest

from smkern.models import SamplingParams
from smkern.server import engine
from smkern.server.messages import Stop, Submit
from tests.server.serving import NAME, Running, run_async, running, simulated, tokens_of

pytestmark = pytest.mark.slow

STREAMS, HANGING = 256, 10
ENDLESS = 100_000


def metrics(server: Running) -> dict[str, float]:
    """All samples, as `name{labels}`."""
    text = httpx2.get(f"{server.url}/metrics").text
    lines = re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


async def stream_all(server: Running, count: int) -> list[tuple[int, list[int], list[int]]]:
    """Tokens asked for, expected and streamed, of each stream."""
    draw = Random(1)
    asked = [
        ([draw.randrange(1000) for _ in range(draw.randint(1, 40))], draw.randint(1, 40))
        for _ in range(count)
    ]
    async with server.async_client as client:

        async def one(at: int) -> tuple[int, list[int], list[int]]:
            prompt, length = asked[at]
            hangs_up = at % HANGING == 0
            stream = await client.completions.create(
                model=NAME, prompt=prompt, stream=True, seed=at,
                max_tokens=ENDLESS if hangs_up else length,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            found: list[int] = []
            async for chunk in stream:
                found += chunk.choices[0].token_ids
                if hangs_up and len(found) >= length:
                    await stream.close()
                    break
            return length, tokens_of(prompt, at, len(found)), found

        return await asyncio.gather(*(one(at) for at in range(count)))


def test_steps_go_on_while_many_requests_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that first took them all would stop every stream for that long."""
    now_s = count(step=0.6 * engine.RECEIVE_S)
    monkeypatch.setattr(engine, "perf_counter", lambda: next(now_s))
    ours, theirs = Pipe()
    mux = simulated()
    with ours, theirs:
        loop = engine.EngineLoop(mux, theirs)
        for number in range(5):
            ours.send(Submit(number, [1, 2, 3], SamplingParams(4)))
        taken = []
        while len(taken) < 4:
            assert loop._receive()
            taken.append(len(mux._requests))
        assert taken == [2, 4, 5, 5]
        ours.send(Stop())
        assert not loop._receive()
    mux.close()


def test_more_than_a_pipe_holds_arrives_whole() -> None:
    """Prompts of a megabyte at a time, while the engine looks into its pipe now and then."""
    prompts = [[at + 70_000] * 20_000 for at in range(10)]

    async def all_of(server: Running) -> list[list[int]]:
        # not by openai's client, which looks at each token of a prompt: 0.5 s a request
        async with httpx2.AsyncClient(base_url=server.url, timeout=60) as client:

            async def one(at: int) -> list[int]:
                asked = {
                    "model": NAME, "prompt": prompts[at], "max_tokens": 3, "seed": at,
                    "return_token_ids": True,
                }  # fmt: skip
                made = await client.post("/v1/completions", json=asked)
                found: list[int] = made.json()["choices"][0]["token_ids"]
                return found

            return await asyncio.gather(*map(one, range(len(prompts))))

    with running(lambda: simulated(pause_s=0.005)) as server:
        found = run_async(all_of(server))
    assert found == [tokens_of(prompt, at, 3) for at, prompt in enumerate(prompts)]


def test_256_streams_of_which_a_tenth_hang_up() -> None:
    with running(lambda: simulated(pause_s=0.001)) as server:
        found = run_async(stream_all(server, STREAMS))
        server.settle()
        seen = metrics(server)
        assert not server.mux._executor.hazards
    left = -(-STREAMS // HANGING)
    for at, (length, expected, tokens) in enumerate(found):
        assert tokens == expected, at
        assert len(tokens) == length or (at % HANGING == 0 and len(tokens) > length)
    assert seen["smkern_requests_total"] == STREAMS
    assert seen['smkern_finished_total{reason="cancelled"}'] == left
    assert seen['smkern_finished_total{reason="length"}'] == STREAMS - left
    assert seen["smkern_http_hangups_total"] == left
    assert seen["smkern_http_choices"] == 0
    path = 'smkern_http_responses_total{path="/v1/completions",status="200"}'
    assert seen[path] == STREAMS
    drawn = sum(len(tokens) for _, _, tokens in found)
    assert seen["smkern_tokens_total"] >= drawn  # some came to clients that had left
