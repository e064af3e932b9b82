"""Bodies of requests: which parameters there are, and how tokens are drawn by them."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from smkern.errors import RequestError
from smkern.limits import shown
from smkern.models.sampling import MAX_SEED, SamplingParams
from smkern.server.errors import ApiError
from smkern.server.messages import Ready

MAX_CHOICES = 128
"""Prompts of a request times `n`."""
MAX_PRIORITY = 2**31 - 1

REQUEST = "the request"

NEUTRAL = {
    "best_of": ("1",),
    "echo": ("false",),
    "frequency_penalty": ("0", "0.0"),
    "logit_bias": ("{}",),
    "logprobs": ("false",),
    "parallel_tool_calls": ("true", "false"),
    "presence_penalty": ("0", "0.0"),
    "response_format": ('{"type": "text"}',),
    "suffix": ('""',),
    "tool_choice": ('"none"', '"auto"'),
    "tools": ("[]",),
    "top_logprobs": ("0",),
}
"""Parameters of OpenAI's that are not served, with the values that ask for nothing."""


Texts = Annotated[list[str], BeforeValidator(lambda x: [x] if isinstance(x, str) else x)]
"""A list of texts, or one; a union would name the kinds that a value is not."""


class StreamOptions(BaseModel):
    """What a stream brings besides tokens; `include_usage`: a last event with the usage."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of requests may say.

    `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`, `return_token_ids` and `priority` are none of
    OpenAI's; they are as in vLLM, where a lower priority is served first. `deadline_ms` is when the
    first token is wanted, after the request came. `user` and `metadata` are taken and not used,
    those in `NEUTRAL` where they ask for nothing.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = Field(None, ge=-MAX_SEED - 1, le=MAX_SEED)
    stop: Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    return_token_ids: bool = False
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    deadline_ms: float | None = Field(None, ge=0, allow_inf_nan=False)

    default_max_tokens: ClassVar[int | None] = None
    """None: as many as the context has room for."""
    prompt_name: ClassVar[str]
    """The parameter that holds the prompt."""

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """A body's JSON.

        Raises:
            ApiError: it is none, a parameter is unknown, of another type, or not served.
        """
        try:
            asked = cls.model_validate_json(body)
        except ValidationError as errors:
            raise _first_of(errors) from None
        for name, value in (asked.model_extra or {}).items():
            if name not in NEUTRAL:
                raise ApiError(_no_parameter(name), param=name)
            if value is not None and json.dumps(value) not in NEUTRAL[name]:
                raise ApiError(
                    f"{name}={shown(value)} is not served: leave it out", param=name,
                    code="unsupported_parameter",
                )  # fmt: skip
        if asked.stream_options is not None and not asked.stream:
            raise ApiError("stream_options without stream: true", param="stream_options")
        if asked.n is not None and not 1 <= asked.n <= MAX_CHOICES:
            raise ApiError(f"n={asked.n}: ask for 1 to {MAX_CHOICES} choices", param="n")
        return asked

    @property
    def limit(self) -> int | None:
        """Tokens to generate; None: nobody said."""
        asked: int | None = getattr(self, self.limit_name)
        return self.default_max_tokens if asked is None else asked

    @property
    def limit_name(self) -> str:
        """Which of OpenAI's two names it has."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a choice."""
        return tuple(self.stop or ())

    def sampling(self, ready: Ready, prompt_tokens: int, choice: int) -> SamplingParams:
        """How a choice's tokens are drawn; stop texts are looked for where the text is made.

        Args:
            ready: Of the engine.
            prompt_tokens: Length of its prompt.
            choice: Its number among the `n`: each has a seed of its own, from 0 again behind the
                largest.

        Raises:
            ApiError: a value outside its limits, or a prompt that leaves no room.
        """
        room = ready.room(prompt_tokens)
        if room < 1:
            raise ApiError(
                f"the prompt has {prompt_tokens} tokens, the model's context holds "
                f"{prompt_tokens + room - 1}: shorten it", param=self.prompt_name,
                code="context_length_exceeded",
            )  # fmt: skip
        limit = room if self.limit is None else min(self.limit, room)
        params = SamplingParams(
            max_new_tokens=limit,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=0 if self.top_k in (None, -1) else self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=0.0 if self.min_p is None else self.min_p,
            seed=None if self.seed is None else (self.seed + choice) & MAX_SEED,
            stop=self.stops,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )
        try:
            params.check(REQUEST, ready.vocab_size)
        except RequestError as error:
            message = str(error).removeprefix(f"{REQUEST}: ")
            message = message.replace("max_new_tokens", self.limit_name)
            raise ApiError(message, param=message.partition(" ")[0].partition("=")[0]) from None
        return params


class CompletionRequest(Asked):
    """`/v1/completions`: a text, a list of texts, token ids, or a list of lists of these."""

    prompt: Any

    prompt_name: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each by itself.

        Raises:
            ApiError: something else, none, or more than there may be choices.
        """
        given = self.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
            given = [given]
        if not isinstance(given, list) or not given or not all(map(_is_prompt, given)):
            raise ApiError(
                f"prompt={shown(given)}: pass a text, token ids, or a list of either, none empty",
                param="prompt",
            )
        if len(given) * (self.n or 1) > MAX_CHOICES:
            raise ApiError(
                f"{len(given)} prompts of {self.n or 1} choices: ask for {MAX_CHOICES} choices at "
                "most", param="prompt",
            )  # fmt: skip
        return given


class Message(BaseModel):
    """A message of a chat; parts other than text are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: str
    content: Any = None
    name: str | None = None


class ChatRequest(Asked):
    """`/v1/chat/completions`.

    `chat_template_kwargs`, as in vLLM, are further variables of the model's chat template.
    """

    messages: list[Message]
    chat_template_kwargs: dict[str, Any] | None = None

    prompt_name: ClassVar[str] = "messages"

    def conversation(self) -> list[dict[str, str]]:
        """The messages as chat templates take them.

        Raises:
            ApiError: none, or one whose content is no text.
        """
        if not self.messages:
            raise ApiError("messages is empty: pass at least one", param="messages")
        return [
            {"role": message.role, "content": _text(message.content, at)}
            for at, message in enumerate(self.messages)
        ]


def _text(content: Any, at: int) -> str:
    """The text of a message's content: a text, none, or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    param = f"messages.{at}.content"
    if not isinstance(content, list):
        raise ApiError(
            f"{param}={shown(content)}: pass a text, or a list of parts of type 'text'",
            param=param,
        )
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ApiError(
                f"{param} has {shown(part)}, a part of type {shown(kind)}: only text is served, "
                "leave it out", param=param, code="unsupported_parameter",
            )  # fmt: skip
        if not isinstance(part.get("text"), str) or len(part) > 2:
            raise ApiError(
                f"{param} has {shown(part)}: only text is served, pass type and text",
                param=param,
            )
    return "".join(part["text"] for part in content)


def _is_id(value: Any) -> bool:
    return type(value) is int


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return value != ""
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _no_parameter(name: str) -> str:
    return f"there is no parameter {name!r}: leave it out"


def _first_of(errors: ValidationError) -> ApiError:
    first = errors.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        message = _no_parameter(param)
    elif first["type"] == "json_invalid":
        message = f"the body is no JSON ({first['msg']})"
    elif first["type"] == "missing":
        message = f"{param} is missing: pass it"
    elif param:
        message = f"{param}={shown(first['input'])}: {first['msg']}"
    else:
        message = f"the body is no JSON object ({first['msg']})"
    return ApiError(message, param=param or None)
