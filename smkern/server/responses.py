"""Responses as OpenAI's API words them, whole and as events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from smkern.server.text import Choice

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def usage(prompts: Sequence[Sequence[int]], choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of the prompts, each counted once, and of all choices.

    Of a prompt's choices the first says what was there already: the others may find what it left.
    """
    prompt = sum(len(ids) for ids in prompts)
    drawn = sum(len(choice.tokens) for choice in choices)
    firsts = choices[:: len(choices) // len(prompts)]
    cached = sum(choice.cached_tokens for choice in firsts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Completions:
    """The responses to one request of `/v1/completions`.

    Args:
        model: Its name.
        with_ids: Whether choices hold their token ids, too.
    """

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, model: str, with_ids: bool) -> None:
        self._with_ids = with_ids
        self._head = {
            "id": f"{self.prefix}-{uuid4().hex}", "created": int(time.time()), "model": model,
        }  # fmt: skip

    def first(self, count: int) -> list[bytes]:
        """Events in front of the first token."""
        return []

    def chunk(self, index: int, text: str, tokens: list[int], choice: Choice) -> bytes:
        """The event of some tokens of a choice.

        Args:
            index: Number of the choice.
            text: What became certain by them.
            tokens: They.
            choice: Its state behind them.
        """
        made = self._choice(index, self._part(text), tokens, choice)
        return event(self._head | {"object": self.chunk_kind, "choices": [made]})

    def last(self, used: dict[str, Any]) -> bytes:
        """The event of the usage."""
        return event(self._head | {"object": self.chunk_kind, "choices": [], "usage": used})

    def whole(self, choices: Sequence[Choice], used: dict[str, Any]) -> dict[str, Any]:
        """The response that is no stream."""
        made = [
            self._choice(index, self._all(choice.text), choice.tokens, choice)
            for index, choice in enumerate(choices)
        ]
        return self._head | {"object": self.kind, "choices": made, "usage": used}

    def _choice(
        self, index: int, said: dict[str, Any], tokens: list[int], choice: Choice
    ) -> dict[str, Any]:
        made = said | {
            "index": index, "logprobs": None, "finish_reason": choice.finish_reason,
        }  # fmt: skip
        return made | {"token_ids": tokens} if self._with_ids else made

    def _part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _all(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatCompletions(Completions):
    """The responses to one request of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self, count: int) -> list[bytes]:
        """Who speaks, for each choice."""
        delta = {"role": "assistant", "content": ""}
        return [
            event(
                self._head
                | {
                    "object": self.chunk_kind,
                    "choices": [
                        {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                    ],
                }
            )
            for index in range(count)
        ]

    def _part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _all(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}
