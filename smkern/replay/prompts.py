"""Token ids of a trace's prompts: random ones, the same for blocks of the same name."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from smkern.replay.trace import Trace

DRAWN = 1 << 16
"""Random tokens that prompts are cut from; what tells prompts apart stands at their begin."""


def token_ids(trace: Trace, number: int, vocab_size: int) -> list[int]:
    """The prompt of a request: blocks of one name are the same tokens, all else its own."""
    request, size = trace.requests[number], trace.block_tokens
    tokens: list[int] = []
    for block in request.blocks:
        tokens += _piece(2 * block, size, vocab_size)
    if len(tokens) < request.prompt_tokens:
        tokens += _piece(2 * number + 1, request.prompt_tokens - len(tokens), vocab_size)
    del tokens[request.prompt_tokens :]
    return tokens


def _piece(name: int, count: int, vocab_size: int) -> list[int]:
    """Tokens that begin by their name's digits, so that no two names' are the same."""
    drawn = _drawn(vocab_size)
    at = name * 7919 % DRAWN
    piece = (drawn[at:] + drawn[:at])[:count] if at + count > DRAWN else drawn[at : at + count]
    while len(piece) < count:
        piece += drawn[: count - len(piece)]
    for place in range(min(4, count)):
        name, piece[place] = divmod(name, vocab_size)
    return piece


@lru_cache(maxsize=4)
def _drawn(vocab_size: int) -> list[int]:
    random = Random(0)
    return [random.randrange(vocab_size) for _ in range(DRAWN)]
