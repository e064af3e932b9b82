"""A request: its tokens, what of it is computed, and what it became."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smkern.kv import BlockChain
from smkern.models.sampling import SamplingParams
from smkern.models.tokenizer import Detokenizer

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt became.

    Attributes:
        index: Number of the request, or of the prompt in a call of `LLM`.
        prompt_len: Tokens of the prompt.
        tokens: The generated ones; one that ended the request is included.
        text: What they add to the prompt's text, without special tokens, the ending token and the
            stop text. None without a tokenizer.
        finish_reason: "stop" (a stop token or text) or "length".
        cached_tokens: Tokens of the prompt whose keys and values were in the pool already.
    """

    index: int
    prompt_len: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    cached_tokens: int


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A prompt on its way through the runtime.

    Attributes:
        index: Number of the request; errors call it "prompt <index>".
        params: How to draw tokens, and when to end.
        seed: Seed of its random numbers.
        stop_token_ids: All tokens that end it.
        max_new_tokens: Tokens to generate at most, the end of the context included.
        ids: Token ids of the prompt and of what was generated.
        prompt_len: How many of them are the prompt's.
        detokenizer: Makes its text, where there is a tokenizer.
        num_computed: Tokens whose keys and values are in its pages.
        cached_tokens: Prompt tokens that it found in the pool when it first came.
        chain: Names of the blocks of `ids`, while it waits.
        finish_reason: Why it is finished; None: it is not.
    """

    index: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    ids: list[int]
    prompt_len: int
    detokenizer: Detokenizer | None = None
    num_computed: int = 0
    cached_tokens: int | None = None
    chain: BlockChain | None = None
    finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return f"prompt {self.index}"

    @property
    def max_tokens_held(self) -> int:
        """Tokens whose keys and values it needs at most: all but the last one drawn."""
        return self.prompt_len + self.max_new_tokens - 1

    def accept(self, token: int) -> tuple[str | None, Completion | None]:
        """Take a drawn token.

        Returns:
            The text that became certain by it, None without a tokenizer; and the completion, where
            the token ends the request.
        """
        self.ids.append(token)
        detokenizer, text = self.detokenizer, None
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
        elif detokenizer is not None:
            text = detokenizer.push(token)
            if detokenizer.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.ids) - self.prompt_len >= self.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is None:
            return text, None
        if detokenizer is not None:
            text = (text or "") + detokenizer.finish()
        return text, Completion(
            self.index,
            self.prompt_len,
            tuple(self.ids[self.prompt_len :]),
            None if detokenizer is None else detokenizer.text,
            self.finish_reason,
            self.cached_tokens or 0,
        )
