"""A request: its tokens, what of it is computed, and what it became."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Literal

from smkern.errors import SmkernError
from smkern.kv import Event, VirtualTokens
from smkern.kv.prefix import Chain
from smkern.models.sampling import SamplingParams
from smkern.models.tokenizer import Detokenizer
from smkern.policies import Waiting

FinishReason = Literal["stop", "length", "error"]
Stage = Literal["future", "waiting", "prefill", "running", "paused", "done"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt became.

    Attributes:
        index: Number of the request, or of the prompt in a call of `LLM`.
        prompt_len: Tokens of the prompt.
        tokens: The generated ones; one that ended the request is included. Of a virtual prompt,
            whose tokens are only counted, none is kept.
        text: What they add to the prompt's text, without special tokens, the ending token and the
            stop text. None without a tokenizer.
        finish_reason: "stop" (a stop token or text), "length", or of `LLM` "error": then tokens and
            text are those so far.
        cached_tokens: Tokens of the prompt whose keys and values were in the pool already.
        error: Why it failed, where it did.
    """

    index: int
    prompt_len: int
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    cached_tokens: int
    error: SmkernError | None = None


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A prompt on its way through the runtime, with all that is known of its length.

    `ids` is what was delivered; `num_computed` of these are in its pages or on their way there, and
    `num_pending` more tokens are drawn, or will be, by launches that were not delivered yet.

    Attributes:
        index: Number of the request; errors call it "prompt <index>".
        params: How to draw tokens, and when to end.
        seed: Seed of its random numbers.
        stop_token_ids: All tokens that end it.
        max_new_tokens: Tokens to generate at most, the end of the context included.
        ids: Token ids of the prompt and of what was generated, or `VirtualTokens`. In an array: a
            full collection of garbage looks at each number that a list holds, some 100 ns each on
            a server, and 1,000 prompts that wait have millions.
        prompt_len: How many of them are the prompt's.
        detokenizer: Makes its text, where there is a tokenizer.
        num_computed: Tokens whose keys and values are in its pages once all launches are over.
        cached_tokens: Prompt tokens that it found in the pool when it first came.
        chain: Names of the blocks of `ids`, while it waits.
        num_expected: Tokens that the pool held of it when it was looked up; None: it was not.
        num_shared: Pages of these that others held then: its admission takes no pages for them.
        queue_key: Where it is in the queue; None: it does not wait.
        finish_reason: Why it is finished; None: it is not.
        priority: Higher goes first.
        arrival_us: When it came.
        deadline_us: When its first token is wanted.
        stage: Where it is.
        num_pending: Tokens that launches have drawn or will draw, and that were not delivered yet.
        room: Tokens that its pages hold; 0: it holds none.
        num_preemptions: How often it began anew: what was launched before draws nothing for it.
        last_use: The end of the last launch that reads or writes its pages.
        to_repeat: Tokens that it drew before it began anew, and must draw again.
        token_us: When its last token was delivered.
        first_token_us: When its first was.
        is_cancelled: Whether its owner wants no more of it.
        error: Why it failed.
        completion: What it became.
    """

    index: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    ids: Any
    prompt_len: int
    detokenizer: Detokenizer | None = None
    num_computed: int = 0
    cached_tokens: int | None = None
    chain: Chain | None = None
    num_expected: int | None = None
    num_shared: int = 0
    queue_key: tuple[int, float, float, int] | None = None
    finish_reason: FinishReason | None = None
    priority: int = 0
    arrival_us: float = 0.0
    deadline_us: float = inf
    stage: Stage = "waiting"
    num_pending: int = 0
    room: int = 0
    num_preemptions: int = 0
    last_use: Event | None = None
    to_repeat: array[int] = field(default_factory=partial(array, "q"))
    token_us: float = 0.0
    first_token_us: float = 0.0
    is_cancelled: bool = False
    error: SmkernError | None = None
    completion: Completion | None = None
    _view: Waiting | None = None

    def __repr__(self) -> str:
        return f"prompt {self.index}"

    @property
    def num_tokens(self) -> int:
        """Its length once all that is launched is over and delivered."""
        return len(self.ids) + self.num_pending

    @property
    def num_left(self) -> int:
        """Tokens to draw when all that is launched is over."""
        return self.prompt_len + self.max_new_tokens - len(self.ids) - self.num_pending

    @property
    def max_tokens_held(self) -> int:
        """Tokens whose keys and values it needs at most: all but the last one drawn."""
        return self.prompt_len + self.max_new_tokens - 1

    @property
    def rank(self) -> tuple[int, float, int]:
        """Least is served first and preempted last: high priority, then early arrival."""
        return (-self.priority, self.arrival_us, self.index)

    def forget_view(self) -> None:
        """What a policy sees of it has changed."""
        self._view = None

    def view(self, pages_for: Callable[[int], int]) -> Waiting:
        """What a policy sees of it while it waits; kept until something changes."""
        if self._view is None:
            length, cached, pages = len(self.ids), self.num_computed, 0
            if not self.room:  # nothing is computed yet, but some of it may be found
                cached, pages = self.num_expected or 0, pages_for(length) - self.num_shared
            self._view = Waiting(
                self.index, self.arrival_us, length - cached, cached, self.priority,
                self.deadline_us, pages,
            )  # fmt: skip
        return self._view

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
            if detokenizer.stopped:
                self.finish_reason = "stop"
        return text, self.became(self.finish_reason)

    def became(self, reason: FinishReason) -> Completion:
        """What it is now, as what it became."""
        return Completion(
            self.index,
            self.prompt_len,
            () if isinstance(self.ids, VirtualTokens) else tuple(self.ids[self.prompt_len :]),
            None if self.detokenizer is None else self.detokenizer.text,
            reason,
            self.cached_tokens or 0,
            self.error,
        )
