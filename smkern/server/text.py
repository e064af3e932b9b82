"""Prompts to token ids, and the text of a choice as its tokens come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from smkern.models.sampling import SamplingParams
from smkern.models.tokenizer import Detokenizer, Tokenizer
from smkern.server.errors import ApiError
from smkern.server.messages import End

if TYPE_CHECKING:
    from smkern.runtime.request import FinishReason

NO_TOKENIZER = (
    "this server has no tokenizer: pass token ids as prompt to /v1/completions, without stop "
    "texts, or start it with --tokenizer <folder>"
)


def encode(tokenizer: Tokenizer | None, prompt: str) -> list[int]:
    """The token ids of a text.

    Raises:
        ApiError: there is no tokenizer, it raises, or finds no token.
    """
    if tokenizer is None:
        raise ApiError(NO_TOKENIZER, param="prompt")
    try:
        ids = list(tokenizer.encode(prompt))
    except Exception as error:
        raise ApiError(f"the tokenizer raised {type(error).__name__}: {error}") from error
    return _checked(ids, "prompt")


def encode_chat(
    tokenizer: Tokenizer | None,
    conversation: list[dict[str, str]],
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token ids of a conversation by the model's chat template, up to the answer's begin.

    Args:
        tokenizer: The model's.
        conversation: Its messages.
        variables: Further ones of the template, Qwen3's `enable_thinking` for example.

    Raises:
        ApiError: no tokenizer, one without a template, a variable that is the server's own, or a
            template that raises at it.
    """
    variables = variables or {}
    if tokenizer is None:
        raise ApiError(NO_TOKENIZER, param="messages")
    apply: Any = getattr(tokenizer, "apply_chat_template", None)
    if apply is None or getattr(tokenizer, "chat_template", None) is None:
        raise ApiError(
            "this model has no chat template: use /v1/completions", code="no_chat_template"
        )
    # An argument of the call is no variable: one of them is another template, a program.
    own = [name for name in variables if name in signature(apply).parameters]
    if own:
        raise ApiError(
            f"chat_template_kwargs has {own[0]!r}, which the server sets itself: leave it out",
            param="chat_template_kwargs",
        )
    try:
        text = apply(conversation, tokenize=False, add_generation_prompt=True, **variables)
        ids = list(tokenizer.encode(text, add_special_tokens=False))  # type: ignore[call-arg]
    except Exception as error:  # a template refuses by raising
        raise ApiError(
            f"the chat template refused the messages: {error}", param="messages"
        ) from error
    return _checked(ids, "messages")


def _checked(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise ApiError("the prompt has no token: pass at least one", param=param)
    return ids


class Choice:
    """One choice of a response as its tokens come.

    Args:
        tokenizer: Makes its text; None: there is none.
        prompt: Token ids of its prompt.
        params: How it is drawn; its stop texts are looked for here.

    Attributes:
        tokens: All so far.
        finish_reason: Why it ended; None: it goes on.
        cached_tokens: Tokens of the prompt that were computed already; 0 before the first token.
    """

    __slots__ = ("_detokenizer", "cached_tokens", "finish_reason", "tokens")

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(tokenizer, prompt, params.stops)

    @property
    def text(self) -> str:
        """Their text so far, cut at a stop text."""
        return "" if self._detokenizer is None else self._detokenizer.text

    def take(self, token: int, end: End | None, cached: int | None = None) -> str:
        """A token came, maybe the last; the text that became certain by it.

        Args:
            token: It.
            end: How it ended, if by this.
            cached: Tokens of the prompt that were computed already; None: told before.
        """
        if cached is not None:
            self.cached_tokens = cached
        self.tokens.append(token)
        detokenizer, text = self._detokenizer, ""
        if detokenizer is not None:
            if end is None or end.reason != "stop":  # a token that ends it has no text
                text = detokenizer.push(token)
            if end is not None:
                text += detokenizer.finish()
            if detokenizer.stopped:
                self.finish_reason = "stop"
        if end is not None:
            self.finish_reason = self.finish_reason or end.reason
        return text
