"""How a request's tokens are drawn, and when it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from math import isfinite
from typing import Any, TypeVar

from smkern.errors import RequestError
from smkern.limits import MAX_FLOAT, shown

MAX_SEED = 2**63 - 1
MAX_STOPS = 64
"""Stop texts of a request: each token looks for all of them."""
MAX_STOP_LENGTH = 256
"""Characters of a stop text."""
MAX_STOP_TOKENS = 1024
"""Stop tokens of a request, beside the model's own."""
ELSEWHERE = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
"""Names that vLLM and OpenAI have for what is called otherwise here."""

T = TypeVar("T")


def _knowing_names(cls: type[T]) -> type[T]:
    """A class that says of an argument which it lacks what to write instead."""
    init: Callable[..., None] = cls.__init__
    known = list(signature(cls).parameters)

    @wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        if (name := next((name for name in given if name not in known), None)) is not None:
            remedy = f"it is not served: leave it out, there is {', '.join(known)}"
            if name in ELSEWHERE:
                remedy = f"it is called {ELSEWHERE[name]} here"
            raise RequestError(f"{cls.__name__}({name}={shown(given[name])}): {remedy}")
        init(self, *args, **given)

    setattr(cls, "__init__", checked)  # noqa: B010 - mypy knows no class's __init__ as a variable
    return cls


@_knowing_names
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are drawn, and when it ends.

    Values are checked when a request is made, so that errors can name it. Filters apply
    in the order temperature, top-k, top-p, min-p.

    Attributes:
        max_new_tokens: Tokens to generate at most; fewer where the model's context ends.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Keeps the k likeliest tokens; 0 keeps all.
        top_p: Keeps the likeliest tokens until their probabilities add up to it; 1 keeps all.
        min_p: Keeps tokens at least this fraction as likely as the likeliest; 0 keeps all.
        seed: The same seed draws the same tokens, whatever else is generated. None: drawn from the
            seed of the `LLM` or `Multiplexer`.
        stop: Texts that end the request, 64 of 256 characters at most; they are cut off. Needs a
            tokenizer.
        stop_token_ids: Tokens that end the request, beside the model's own; 1,024 at most.
        ignore_eos: Whether the model's own end tokens do not end it.

    Raises:
        RequestError: a parameter that is called otherwise here, or is not served.

    Source: nucleus sampling (arXiv 1904.09751) section 3.1, min-p (arXiv 2407.01082) section 3.

    Example:
        >>> from smkern.models import SamplingParams
        >>> SamplingParams(max_new_tokens=16, temperature=0.7, top_p=0.9, seed=1).top_k
        0
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts, also where one was given as a string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check(self, request: str, vocab_size: int) -> None:
        """Check the values for a request of a model.

        Raises:
            RequestError: naming the request, the value and its limits.
        """

        def refuse(name: str, limits: str) -> None:
            raise RequestError(f"{request}: {name}={shown(getattr(self, name))}: pass {limits}")

        def refuse_more(name: str, count: int, what: str, most: int) -> None:
            raise RequestError(f"{request}: {name} has {count} {what}: pass {most} at most")

        if not _is_int(self.max_new_tokens, 1, MAX_SEED):
            refuse("max_new_tokens", "a whole number of at least 1")
        if not _is_number(self.temperature) or not 0 <= self.temperature <= MAX_FLOAT:
            limits = f"a finite number of at least 0, where 0 is greedy, and at most {MAX_FLOAT:g}"
            refuse("temperature", limits)
        if not _is_int(self.top_k, 0, 2**31 - 1):
            refuse("top_k", "a whole number of at least 0, where 0 keeps all")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            refuse("top_p", "a number above 0 and at most 1, where 1 keeps all")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            refuse("min_p", "a number of 0 to 1, where 0 keeps all")
        if self.seed is not None and not _is_int(self.seed, 0, MAX_SEED):
            refuse("seed", f"a whole number of 0 to {MAX_SEED}, or None")
        if not isinstance(self.stop, (str, tuple, list)) or any(
            not isinstance(text, str) or not text for text in self.stops
        ):
            refuse("stop", "a text, or a tuple of texts, none of them empty")
        if len(self.stops) > MAX_STOPS:
            refuse_more("stop", len(self.stops), "texts", MAX_STOPS)
        if (longest := max(map(len, self.stops), default=0)) > MAX_STOP_LENGTH:
            refuse_more("stop", longest, "characters in a text", MAX_STOP_LENGTH)
        if not isinstance(self.stop_token_ids, (tuple, list, set, frozenset)) or any(
            not _is_int(token, 0, vocab_size - 1) for token in self.stop_token_ids
        ):
            refuse("stop_token_ids", f"a tuple of token ids of 0 to {vocab_size - 1}")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            refuse_more("stop_token_ids", len(self.stop_token_ids), "tokens", MAX_STOP_TOKENS)
        if type(self.ignore_eos) is not bool:
            refuse("ignore_eos", "True or False")


def _is_int(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # an int that no float holds
        return False
