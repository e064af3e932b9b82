"""A request on its way: its tokens, what of it is computed, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from smkern.kv import BlockChain
from smkern.models.sampling import SamplingParams
from smkern.models.text import TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt became.

    Attributes:
        index: Of the prompt.
        prompt_len: Its tokens.
        tokens: Those that were generated, one that ended it included.
        text: What they add to the prompt's; special tokens, an ending one and a stop text are left
            out. None without a tokenizer.
        finish_reason: "stop" (a stop token or text) or "length".
        cached_tokens: Of the prompt, those whose keys and values were in the pool already.
    """

    index: int
    prompt_len: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step added to a prompt's completion.

    Attributes:
        index: Of the prompt.
        token: That was generated.
        text: That became certain by it, maybe none yet. None without a tokenizer.
        completion: All of it, once it is finished.
    """

    index: int
    token: int
    text: str | None
    completion: Completion | None = None


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        index: Of the prompt.
        params: How to draw and when to end.
        seed: Of its random numbers.
        stop_token_ids: All tokens that end it.
        max_new_tokens: At most, the context's end included.
        ids: Token ids of the prompt and of what was generated.
        prompt_len: How many of them are the prompt's.
        stream: Its text, where there is a tokenizer.
        num_computed: Tokens whose keys and values are in its pages.
        cached_tokens: What it found in the pool when it first came.
        chain: Names of the blocks of `ids`, while it waits.
        finish_reason: Once it is finished.
    """

    index: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    ids: list[int]
    prompt_len: int
    stream: TextStream | None = None
    num_computed: int = 0
    cached_tokens: int | None = None
    chain: BlockChain | None = None
    finish_reason: FinishReason | None = None

    def __repr__(self) -> str:
        return f"prompt {self.index}"

    @property
    def num_uncomputed(self) -> int:
        """Tokens to run through the model before the next can be drawn; 1 while decoding."""
        return len(self.ids) - self.num_computed

    @property
    def max_tokens_held(self) -> int:
        """Tokens whose keys and values it needs at most: all but the last one drawn."""
        return self.prompt_len + self.max_new_tokens - 1

    def accept(self, token: int) -> Piece:
        """Take a drawn token; finishes the request where it ends it."""
        self.ids.append(token)
        text = None
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
        elif self.stream is not None:
            text = self.stream.push(token)
            if self.stream.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and len(self.ids) - self.prompt_len >= self.max_new_tokens:
            self.finish_reason = "length"
        if self.finish_reason is None:
            return Piece(self.index, token, text)
        if self.stream is not None:
            text = (text or "") + self.stream.finish()
        return Piece(self.index, token, text, self._completion())

    def _completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            self.index,
            self.prompt_len,
            tuple(self.ids[self.prompt_len :]),
            None if self.stream is None else self.stream.text,
            self.finish_reason,
            self.cached_tokens or 0,
        )
