"""What is malformed, too large or of another server gets a 4xx that says why; the engine lives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from smkern.server.app import Limits
from tests.server.serving import NAME, Chatting, Running, running, with_tensors

KEY = "secret"
BODY_BYTES = 8192


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    limits = Limits(api_key=KEY, max_body_bytes=BODY_BYTES, max_choices=6)
    with running(with_tensors, tokenizer=Chatting(), limits=limits) as found:
        found.key = KEY
        yield found
        assert found.client.completions.create(model=NAME, prompt="abc", max_tokens=3).usage
        assert not found.mux.dead


def post(server: Running, body: Any, path: str = "completions", key: str = KEY) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return server.http.post(f"/v1/{path}", content=content, headers=headers)


def refused(response: httpx2.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, in OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert {*error} == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return dict(error)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no JSON"), (b"{", "no JSON"), (b"[]", "no JSON object"), (b"null", "no JSON object"),
        (b"\xff\xfe", "no JSON"), (b"[" * 3000, "no JSON"), (b'{"model": NaN}', "model"),
    ],
)  # fmt: skip
def test_bodies_that_are_none(server: Running, body: bytes, said: str) -> None:
    assert said in refused(post(server, body))["message"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": 7}, "prompt"),
        ({"prompt": None}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"), ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 1.5}, "n"),
        ({"max_tokens": "5"}, "max_tokens"), ({"stream": 1}, "stream"), ({"stop": 5}, "stop"),
        ({"stop": [1]}, "stop.0"), ({"seed": "x"}, "seed"), ({"colour": 1}, "colour"),
        ({"stream_options": {}}, "stream_options"), ({"user": 5}, "user"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"logprobs": 3}, "logprobs"), ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"), ({"priority": 1.5}, "priority"),
        ({"priority": 2**31}, "priority"), ({"deadline_ms": -1}, "deadline_ms"),
        ({"deadline_ms": "soon"}, "deadline_ms"), ({"deadline_ms": 1e999}, "deadline_ms"),
    ],
)  # fmt: skip
def test_parameters_that_are_wrong_are_named(server, change, param) -> None:
    error = refused(post(server, {"model": NAME, "prompt": "abc"} | change))
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": -1}, "temperature=-1"), ({"temperature": 1e999}, "temperature=inf"),
        ({"top_p": 0}, "top_p=0"), ({"top_p": 1.5}, "top_p=1.5"), ({"top_k": -2}, "top_k=-2"),
        ({"min_p": 2}, "min_p=2"), ({"max_tokens": 0}, "max_tokens=0: pass a whole number of at"),
        ({"max_tokens": -5}, "max_tokens=-5"),
        ({"seed": 2**63}, f"seed={2**63}: Input should be less than or equal to {2**63 - 1}"),
        ({"seed": -(2**63) - 1}, f"seed={-(2**63) - 1}: Input should be greater than or equal to"),
        ({"max_tokens": "5"}, "max_tokens='5': Input should be a valid integer"),
        ({"max_completion_tokens": 0}, "max_completion_tokens=0: pass a whole number of at least"),
        ({"priority": 2**70}, f"priority={2**70}: "), ({"model": None}, "model=None: "),
        ({"stop": ""}, "stop=('',)"), ({"stop": ["a", ""]}, "stop="),
        ({"stop_token_ids": [64]}, "token ids of 0 to 63"),
        ({"stop": ["x"] * 65}, "stop has 65 texts: pass 64 at most"),
        ({"stop": "x" * 257}, "stop has 257 characters in a text: pass 256 at most"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids has 1025 tokens: pass 1024 at most"),
        ({"prompt": [5, 64]}, "the prompt has 64 at position 1: token ids are whole numbers of 0"),
        ({"prompt": [-1]}, "the prompt has -1 at position 0"),
        ({"prompt": [10**30]}, "at position 0"),
        ({"prompt": "a" * 257}, "the prompt has 257 tokens, the model's context holds 256"),
    ],
)  # fmt: skip
def test_values_outside_their_limits_say_them(server, change, said) -> None:
    error = refused(post(server, {"model": NAME, "prompt": "abc"} | change))
    assert said in error["message"]
    assert error["param"] == (None if "position" in said else next(iter(change)))


def test_a_prompt_over_the_limit_has_openais_code(server: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.completions.create(model=NAME, prompt=[1] * 300, stream=True)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is empty"), ("hi", "messages='hi': "),
        ([{"content": "a"}], "messages.0.role is missing: pass it"),
        ([{"role": "user", "content": "a" * 257}], "the prompt has 258 tokens"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "only text is served"),
        ([{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}], "pass type and"),
        ([{"role": "user", "content": 5}], "messages.0.content=5: pass a text, or a list of parts"),
        ([{"role": "user", "content": ["a"]}], "messages.0.content has 'a', a part of type None"),
        ([{"role": "nobody", "content": "a"}], "roles are user and assistant"),
    ],
)  # fmt: skip
def test_conversations_that_no_template_takes(server: Running, messages: Any, said: str) -> None:
    body = {"model": NAME, "messages": messages}
    error = refused(post(server, body, "chat/completions"))
    assert said in error["message"]
    assert error["param"].startswith("messages")


def test_an_image_is_refused_by_name(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "a"}, image]
    body = {"model": NAME, "messages": [{"role": "user", "content": content}]}
    error = refused(post(server, body, "chat/completions"))
    assert "a part of type 'image_url': only text is served, leave it out" in error["message"]
    assert (error["param"], error["code"]) == ("messages.0.content", "unsupported_parameter")


def test_an_unknown_model(server: Running) -> None:
    error = refused(post(server, {"model": "gpt", "prompt": "a"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("extra", [0, 1 << 20])
def test_a_body_that_is_too_large_is_not_read_to_its_end(server: Running, extra: int) -> None:
    body = {"model": NAME, "prompt": "a" * (BODY_BYTES + extra)}
    assert f"more than {BODY_BYTES} bytes" in refused(post(server, body), 413)["message"]


def test_a_body_in_parts_is_counted_too(server: Running) -> None:
    parts = iter([b"x" * 1024] * 1024)
    headers = {"authorization": f"Bearer {KEY}"}
    refused(httpx2.post(f"{server.url}/v1/completions", content=parts, headers=headers), 413)


@pytest.mark.parametrize("key", ["", "wrong", "sécret"])
def test_a_wrong_key_is_refused_wherever_v1_is(server: Running, key: str) -> None:
    headers = {"authorization": f"Bearer {key}".strip().encode()}
    for path in ("models", f"models/{NAME}", "completions", "chat/completions"):
        method = "GET" if path.startswith("models") else "POST"
        response = server.http.request(method, f"/v1/{path}", headers=headers)
        assert refused(response, 401)["code"] == "invalid_api_key"
    assert server.http.get("/health").status_code == 200
    assert "smkern_tokens_total" in server.http.get("/metrics").text


@pytest.mark.parametrize("key", [KEY, "schlüssel", "鍵"])
def test_the_right_key_is_right_in_any_letters(key: str) -> None:
    with running(with_tensors, limits=Limits(api_key=key)) as server:
        for scheme in ("Bearer", "bearer", "BEARER"):
            headers = {b"authorization": f"{scheme} {key}".encode()}
            assert server.http.get("/v1/models", headers=headers).status_code == 200
        for wrong in (f"Basic {key}", key, f"Bearer{key}", f"Bearer {key}x"):
            headers = {b"authorization": wrong.encode()}
            refused(server.http.get("/v1/models", headers=headers), 401)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404), ("GET", "/v1/embeddings", 404), ("GET", "/v1/completions", 405),
        ("POST", "/health", 405), ("DELETE", f"/v1/models/{NAME}", 405),
    ],
)  # fmt: skip
def test_other_paths_and_methods(server: Running, method: str, path: str, status: int) -> None:
    error = refused(server.http.request(method, path), status)
    assert method in error["message"]


def test_responses_are_counted_by_path_and_status_also_where_no_route_is(server: Running) -> None:
    def counted(path: str, status: int) -> float:
        name = f'smkern_http_responses_total{{path="{path}",status="{status}"}}'
        found = re.search(rf"^{re.escape(name)} (\S+)$", server.http.get("/metrics").text, re.M)
        return float(found[1]) if found else 0.0

    asked = [("GET", "/nowhere", "other", 404), ("GET", "/v1/completions", "other", 405),
             ("GET", "/health", "/health", 200)]  # fmt: skip
    before = [counted(path, status) for _, _, path, status in asked]
    for method, url, _, _ in asked:
        server.http.request(method, url)
    assert [counted(path, status) for _, _, path, status in asked] == [x + 1 for x in before]


def test_too_many_choices_at_a_time_are_sent_away(server: Running) -> None:
    error = refused(post(server, {"model": NAME, "prompt": "a", "n": 7}), 503)
    assert error["code"] == "overloaded"


def test_without_a_tokenizer_texts_are_refused_and_ids_served() -> None:
    with running(with_tensors) as server:
        for change in ({"prompt": "abc"}, {"prompt": [1], "stop": "x"}):
            error = refused(post(server, {"model": NAME} | change))
            assert "pass token ids as prompt" in error["message"]
        chat = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
        assert "no tokenizer" in refused(post(server, chat, "chat/completions"))["message"]
        body = {"model": NAME, "prompt": [1, 2], "max_tokens": 2, "return_token_ids": True}
        assert len(post(server, body).json()["choices"][0]["token_ids"]) == 2
