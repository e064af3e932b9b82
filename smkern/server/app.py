"""The HTTP application: routes, limits, and how a generation becomes a response."""

from __future__ import annotations

import asyncio
import hmac
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from anyio import to_thread
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from smkern.models.sampling import SamplingParams
from smkern.models.tokenizer import Tokenizer
from smkern.server.client import EngineClient, EngineError, Event, Generation
from smkern.server.errors import ApiError, of_engine
from smkern.server.messages import Ready
from smkern.server.protocol import Asked, ChatRequest, CompletionRequest
from smkern.server.responses import DONE, ChatCompletions, Completions, event, usage
from smkern.server.text import NO_TOKENIZER, Choice, encode, encode_chat

SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may ask for.

    Attributes:
        api_key: What `Authorization: Bearer` must say; None: nobody is asked.
        max_body_bytes: Of a request.
        max_choices: Choices that are not finished, of all clients together.
    """

    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    max_choices: int = 2048


class Server:
    """The application, for uvicorn or another ASGI server.

    Args:
        name: The model's, for clients.
        tokenizer: For texts; None: token ids alone.

    Attributes:
        app: The ASGI application.
    """

    def __init__(
        self,
        client: EngineClient,
        ready: Ready,
        name: str,
        tokenizer: Tokenizer | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._client = client
        self._ready = ready
        self._name = name
        self._tokenizer = tokenizer
        self._limits = Limits() if limits is None else limits
        self._registry = CollectorRegistry()
        self._responses = Counter(
            "smkern_http_responses", "Responses begun", ["path", "status"], registry=self._registry
        )
        self._hangups = Counter(
            "smkern_http_hangups", "Clients that left before the end", registry=self._registry
        )
        live = Gauge("smkern_http_choices", "Choices not finished", registry=self._registry)
        live.set_function(lambda: client.num_live)
        routes = {
            "/v1/completions": ("POST", self._completions),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/models": ("GET", self._models),
            "/v1/models/{name:path}": ("GET", self._model),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }
        self.app = Starlette(
            routes=[
                Route(path, self._guarded(path, call), methods=[method])
                for path, (method, call) in routes.items()
            ],
            exception_handlers={HTTPException: self._refused, Exception: self._refused},
            lifespan=self._lifespan,
        )

    async def _completions(self, request: Request) -> Response:
        asked = CompletionRequest.parse(await self._body(request))
        self._check(asked)
        prompts = [
            await to_thread.run_sync(encode, self._tokenizer, prompt)
            if isinstance(prompt, str)
            else prompt
            for prompt in asked.prompts()
        ]
        return await self._generate(request, asked, prompts, Completions)

    async def _chat(self, request: Request) -> Response:
        asked = ChatRequest.parse(await self._body(request))
        self._check(asked)
        prompt = await to_thread.run_sync(
            encode_chat, self._tokenizer, asked.conversation(), asked.chat_template_kwargs
        )
        return await self._generate(request, asked, [prompt], ChatCompletions)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._card())

    async def _health(self, request: Request) -> Response:
        failure = self._client.failure
        if failure is not None:
            raise of_engine(failure)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        text = await self._client.metrics() + generate_latest(self._registry).decode()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    def _check(self, asked: Asked) -> None:
        self._check_name(asked.model)
        if asked.stops and self._tokenizer is None:
            raise ApiError(NO_TOKENIZER, param="stop")

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise ApiError(
                f"there is no model {name!r:.100} here, but {self._name!r}", status=404,
                param="model", code="model_not_found",
            )  # fmt: skip

    def _check_key(self, path: str, request: Request) -> None:
        key = self._limits.api_key
        if key is None or not path.startswith("/v1/"):
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # starlette reads a header's bytes as latin-1
        is_right = hmac.compare_digest(given.strip().encode("latin-1"), key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                "the API key is missing or wrong: send Authorization: Bearer <key>", status=401,
                code="invalid_api_key", headers={"www-authenticate": "Bearer"},
            )  # fmt: skip

    async def _body(self, request: Request) -> bytes:
        """The body; one that is too large is read no further."""
        most, found = self._limits.max_body_bytes, bytearray()
        async for part in request.stream():
            found += part
            if len(found) > most:
                raise ApiError(
                    f"the body has more than {most} bytes: shorten the prompt, or start the server "
                    "with a larger --max-body-mib", status=413, headers={"connection": "close"},
                )  # fmt: skip
        return bytes(found)

    async def _generate(
        self, request: Request, asked: Asked, prompts: Sequence[list[int]], kind: type[Completions]
    ) -> Response:
        prompt_of = [prompt for prompt in prompts for _ in range(asked.n or 1)]
        params = [
            asked.sampling(self._ready, len(prompt), at % (asked.n or 1))
            for at, prompt in enumerate(prompt_of)
        ]
        if self._client.num_live + len(params) > self._limits.max_choices:
            raise ApiError(
                f"{self._client.num_live} choices of {self._limits.max_choices} are under way: try "
                "again later", status=503, code="overloaded", headers={"retry-after": "1"},
            )  # fmt: skip
        generation = await self._client.generate(
            prompt_of, [_unstopped(x) for x in params],
            priority=-asked.priority, deadline_ms=asked.deadline_ms,
        )  # fmt: skip
        choices = [
            Choice(self._tokenizer, prompt, how)
            for prompt, how in zip(prompt_of, params, strict=True)
        ]
        running = Running(generation, choices, prompts, kind(self._name, asked.return_token_ids))
        if asked.stream:
            with_usage = asked.stream_options is not None and asked.stream_options.include_usage
            return EventStream(running.events(with_usage), generation, self._hangups.inc)
        async with leaving(generation, request.receive, self._hangups.inc):
            body = await running.whole()
        return JSONResponse(body)

    def _guarded(self, path: str, call: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """A route with the key checked, errors answered and responses counted."""

        async def run(request: Request) -> Response:
            try:
                self._check_key(path, request)
                response: Response = await call(request)
            except ApiError as error:
                response = _answer(error)
            except EngineError as error:
                response = _answer(of_engine(error.fault))
            except ClientDisconnect:
                self._hangups.inc()
                response = Response(status_code=499)
            self._responses.labels(path, response.status_code).inc()
            return response

        return run

    async def _refused(self, request: Request, error: Exception) -> Response:
        """What no route answers."""
        if isinstance(error, HTTPException):
            message = f"{request.method} {request.url.path!r:.100}: {error.detail}"
            said = ApiError(message, status=error.status_code, headers=error.headers)
        else:
            said = ApiError(f"{type(error).__name__} in the server", status=500)
        self._responses.labels("other", said.status).inc()
        return _answer(said)

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._name, "object": "model", "created": 0, "owned_by": "smkern",
            "max_model_len": min(self._ready.max_context, self._ready.kv_tokens),
        }  # fmt: skip

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._client.start()
        yield
        self._client.stop()


@dataclass(slots=True, eq=False)
class Running:
    """A generation on its way into a response: its tokens, a choice each, the prompts, each once,
    and the response's wording."""

    _generation: Generation
    _choices: Sequence[Choice]
    _prompts: Sequence[list[int]]
    _wording: Completions

    async def events(self, with_usage: bool) -> AsyncIterator[bytes]:
        """The events of a stream, as many at a time as there are."""
        wording, choices = self._wording, self._choices
        try:
            for part in wording.first(len(choices)):
                yield part
            async for events in self._generation:
                yield b"".join(
                    wording.chunk(index, text, tokens, choices[index])
                    for index, (text, tokens) in self._taken(events).items()
                )
        except ApiError as error:
            yield event(error.body()) + DONE
            return
        yield wording.last(usage(self._prompts, choices)) + DONE if with_usage else DONE

    async def whole(self) -> dict[str, Any]:
        """The response that is no stream.

        Raises:
            ApiError: a choice failed.
        """
        async for events in self._generation:
            self._taken(events)
        return self._wording.whole(self._choices, usage(self._prompts, self._choices))

    def _taken(self, events: Sequence[Event]) -> dict[int, tuple[str, list[int]]]:
        """Text and tokens that came, by choice.

        Raises:
            ApiError: a choice failed, or its tokenizer raised at it.
        """
        texts: dict[int, str] = defaultdict(str)
        tokens: dict[int, list[int]] = defaultdict(list)
        for index, token, end, cached in events:
            choice = self._choices[index]
            if choice.finish_reason is not None:
                continue  # drawn before the engine knew of a stop text
            if token is None:
                assert end is not None
                assert end.fault is not None
                raise of_engine(end.fault)
            try:
                texts[index] += choice.take(token, end, cached)
            except Exception as error:
                raise ApiError(
                    f"the tokenizer raised {type(error).__name__} at the text of token {token}",
                    status=500,
                ) from error
            tokens[index].append(token)
            if choice.finish_reason is not None:
                self._generation.cancel(index)
        return {index: (texts[index], tokens[index]) for index in tokens}


class EventStream(Response):
    """Server-sent events; a client that hangs up ends its generation at once."""

    def __init__(
        self, body: AsyncIterator[bytes], generation: Generation, on_hangup: Callable[[], None]
    ) -> None:
        self.status_code = 200
        self.init_headers(SSE)
        self._body = body
        self._generation = generation
        self._on_hangup = on_hangup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with leaving(self._generation, receive, self._on_hangup):
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            async for part in self._body:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def leaving(
    generation: Generation, receive: Receive, on_hangup: Callable[[], None]
) -> AsyncIterator[None]:
    """Close a generation when its client hangs up, and at the end in any case."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not generation.is_over:
            on_hangup()
        generation.close()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        watching.cancel()
        generation.close()


def _unstopped(params: SamplingParams) -> SamplingParams:
    return replace(params, stop=()) if params.stop else params


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
