"""What fails takes its own requests along; an engine that is lost is told to every client."""

from __future__ import annotations

from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

import httpx2
import openai
import pytest

from smkern.errors import ConfigError
from smkern.server.engine import serve_connection
from smkern.server.messages import Failed, Fault
from tests.models.generation import Letters, Raising
from tests.server.serving import (
    NAME,
    Chatting,
    Running,
    running,
    simulated,
    tokens_of,
    with_tensors,
)

pytestmark = pytest.mark.slow

PROMPT = [1, 2, 3]
AT = 40
"""A launch in the middle of a long stream."""


def stream(server: Running, count: int) -> Any:
    return server.client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=count, seed=1, stream=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip


def tokens_until_error(server: Running, count: int, said: str) -> list[int]:
    found: list[int] = []
    with pytest.raises(openai.APIError, match=said):  # noqa: PT012  how far it came matters
        for part in stream(server, count):
            found += part.choices[0].token_ids  # type: ignore[attr-defined]
    return found


def test_a_launch_that_raises_ends_its_stream_alone() -> None:
    with running(lambda: simulated(faults={AT: "raise"})) as server:
        found = tokens_until_error(server, 500, "raised .a fault asked for")
        assert 0 < len(found) < 500
        assert found == tokens_of(PROMPT, 1, len(found))
        assert server.http.get("/health").status_code == 200
        parts = list(stream(server, 5))
        assert [t for x in parts for t in x.choices[0].token_ids] == tokens_of(PROMPT, 1, 5)
        server.settle()


@pytest.mark.parametrize(
    ("fault", "said"), [("lost", "DeviceError: "), ("hang", "StalledError: nothing has ended for")]
)
def test_a_device_that_is_lost_ends_the_engine_and_every_client_hears_it(fault, said) -> None:
    with running(lambda: simulated(faults={AT: fault})) as server:
        found = tokens_until_error(server, 500, said)
        assert found == tokens_of(PROMPT, 1, len(found))
        for path in ("health", "metrics"):
            response = server.http.get(f"/{path}")
            assert response.status_code == 503
            assert said in response.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match=said) as caught:
            stream(server, 5)
        assert caught.value.status_code == 503


class RaisingChat(Raising, Chatting):
    """Raises at the text of one token; it has a chat template."""


@pytest.mark.parametrize("streams", [False, True])
def test_a_tokenizer_that_raises_ends_its_own_request(streams: bool) -> None:
    torn = RaisingChat()
    with running(with_tensors, tokenizer=torn) as server:
        asked: dict[str, Any] = {"model": NAME, "prompt": "hello", "temperature": 0}
        asked |= {"max_tokens": 30, "extra_body": {"return_token_ids": True}}
        tokens = server.client.completions.create(**asked).choices[0].token_ids  # type: ignore[attr-defined]
        torn.token = next(token for token in tokens[3:] if token not in Letters().encode("hello"))
        with pytest.raises(openai.APIError, match="tokenizer raised UnicodeError"):
            list(server.client.completions.create(**asked, stream=streams))
        server.settle()
        torn.token = -1
        assert server.client.completions.create(**asked).choices[0].token_ids == tokens  # type: ignore[attr-defined]


def test_a_client_that_hangs_up_before_the_first_token_costs_nothing_more() -> None:
    """Of a response that is no stream: nobody would read it."""
    with running(lambda: simulated(pause_s=0.01)) as server:
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 100_000}
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(f"{server.url}/v1/completions", json=body, timeout=0.5)
        server.settle()
        assert server.mux.stats().finished == {"cancelled": 1}


def test_an_engine_that_cannot_begin_says_why() -> None:
    @contextmanager
    def broken() -> Any:
        raise ConfigError("no such model")
        yield

    ours, theirs = Pipe()
    serve_connection(theirs, broken)
    assert ours.recv() == Failed(Fault("ConfigError", "no such model"))
    with pytest.raises(EOFError):
        ours.recv()
