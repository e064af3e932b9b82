"""Whatever a client sends, it gets tokens or an error in OpenAI's shape, and so does the next."""

from __future__ import annotations

import json
import socket
from random import Random
from typing import Any

import httpx2

from smkern.server.app import Limits
from tests.fuzz.conftest import Cases
from tests.server.serving import NAME, Chatting, Running, running, with_tensors

PATHS = ("completions", "chat/completions")
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, 1e999, "", "a", "\0", "é",
    "a" * 300, [], [0], [63], [64], [-1], [[1, 2], [3]], [None], ["a", 1], {}, {"a": 1}, [[[]]],
    {"type": "text", "text": "a"}, [{"role": "user", "content": "abc"}], [{"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": "ab"}]}],
)  # fmt: skip
KEYS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "n", "seed", "stop", "stream", "stream_options", "user", "metadata", "top_k", "min_p",
    "stop_token_ids", "ignore_eos", "return_token_ids", "echo", "logprobs", "logit_bias", "tools",
    "response_format", "suffix", "nothing", "chat_template_kwargs",
)  # fmt: skip


def body(random: Random) -> bytes:
    """A request with some values exchanged; at times its JSON is cut or spoiled."""
    given: dict[str, Any] = {"model": NAME, "max_tokens": random.randint(1, 4)}
    given |= {"prompt": "abc"} if random.random() < 0.6 else {}
    given |= {"messages": [{"role": "user", "content": "ab"}]} if random.random() < 0.5 else {}
    for key in random.sample(KEYS, random.randint(0, 3)):
        given[key] = random.choice(ODD)
    text = json.dumps(given).encode()
    if random.random() < 0.1:
        text = text[: random.randrange(len(text))]
    if random.random() < 0.1:
        at = random.randrange(len(text) + 1)
        text = text[:at] + random.randbytes(random.randint(1, 4)) + text[at:]
    return text


def check(response: httpx2.Response) -> None:
    """Tokens, or an error that says something."""
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.status_code == 200
        events = [x.removeprefix("data: ") for x in response.text.split("\n\n") if x]
        assert events[-1] == "[DONE]"
        assert all(json.loads(event)["choices"] is not None for event in events[:-1])
        return
    found = response.json()
    if response.status_code == 200:
        assert all(x["finish_reason"] in ("stop", "length") for x in found["choices"])
        return
    assert response.status_code in (400, 404, 413, 503), response.text
    assert {*found["error"]} == {"message", "type", "param", "code"}
    assert len(found["error"]["message"]) > 10


def test_any_body_gets_tokens_or_an_error(cases: Cases) -> None:
    limits = Limits(max_body_bytes=2000, max_choices=64)
    with running(with_tensors, tokenizer=Chatting(), limits=limits) as server:
        with httpx2.Client(base_url=f"{server.url}/v1/", timeout=60) as client:
            for random in cases(150):
                check(client.post(random.choice(PATHS), content=body(random)))
            made = client.post("completions", json={"model": NAME, "prompt": "abc"})
            assert made.json()["usage"]["completion_tokens"] == 16
        server.settle()


def test_any_bytes_on_the_socket_leave_the_server_alive(cases: Cases) -> None:
    with running(with_tensors, tokenizer=Chatting()) as server:
        for random in cases(40):
            send(server, random)
        made = httpx2.post(f"{server.url}/v1/completions", json={"model": NAME, "prompt": "abc"})
        assert made.json()["usage"]["completion_tokens"] == 16
        server.settle()


def send(server: Running, random: Random) -> None:
    """Bytes that are nearly a request; the client leaves at a moment of its own."""
    length = random.choice([0, 5, 40, 400, -1, 2**70])
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
    given = json.dumps({"model": NAME, "prompt": "abc", "stream": random.random() < 0.5}).encode()
    raw = bytearray(head.encode() + given)
    for _ in range(random.choice([0, 0, 1, 5])):
        raw[random.randrange(len(raw))] = random.randrange(256)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=0.05) as connection:
        try:
            connection.sendall(raw[: random.randrange(len(raw) + 1)])
            if random.random() < 0.5:
                connection.recv(100)
        except OSError:
            pass  # it does not have to answer, nor to listen
