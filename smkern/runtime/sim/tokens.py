"""Tokens of a model that is not there: a pure function of the request."""

from __future__ import annotations

from smkern.models.config import ModelConfig
from smkern.runtime.request import Request

_MASK = 2**64 - 1


class TokenSource:
    """Which token a request draws at a position, whatever runs beside it.

    token = f(seed, prompt, position): uniform over the vocabulary without the model's end tokens,
    and one of these with `end_probability`.

    Args:
        config: Vocabulary and end tokens.
        end_probability: Probability that a token ends its text.

    Example:
        >>> from smkern.models import preset
        >>> source = TokenSource(preset("qwen3-8b"), 0.0)
        >>> key = source.key(1, [5, 6, 7])
        >>> source.token(key, 3) == source.token(key, 3) != source.token(key, 4)
        True
    """

    def __init__(self, config: ModelConfig, end_probability: float) -> None:
        self._ends = tuple(sorted(config.eos_token_ids))
        self._others = config.vocab_size - len(self._ends)
        self._limit = int(end_probability * 2**32) if self._ends else 0

    @property
    def plain_token(self) -> int:
        """The first token that ends nothing."""
        return next(token for token in range(len(self._ends) + 1) if token not in self._ends)

    def key(self, seed: int, prompt: list[int]) -> int:
        """A request's own number."""
        return _mixed(_mixed(seed & _MASK) ^ (hash(tuple(prompt)) & _MASK))

    def token(self, key: int, position: int) -> int:
        """The token at a position, that of the prompt's first token being 0."""
        number = _mixed(key + position * 0x9E3779B97F4A7C15 & _MASK)
        if number >> 32 < self._limit:
            return self._ends[number % len(self._ends)]
        token = (number & 0xFFFFFFFF) % self._others
        for end in self._ends:
            token += token >= end
        return token

    def completion(self, request: Request) -> list[int]:
        """All tokens that a request draws, stop texts left aside: what every schedule must give."""
        key = self.key(request.seed, request.ids[: request.prompt_len])
        tokens: list[int] = []
        while len(tokens) < request.max_new_tokens:
            tokens.append(self.token(key, request.prompt_len + len(tokens)))
            if tokens[-1] in request.stop_token_ids:
                break
        return tokens


def _mixed(number: int) -> int:
    """The finaliser of SplitMix64: every bit of the input changes half of the output's."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
