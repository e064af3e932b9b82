"""How many tokens a batch of prompts needs to be computed fast, and what a time has room for."""

from __future__ import annotations

from smkern.latency import Chunk, Size
from smkern.latency.predictor import Predictor

FEWEST, MOST = 128, 8192
NEARLY = 0.95
"""Of twice the time for twice the tokens."""
PROMPT = 1024
"""Tokens of each of the prompts that a time has room for."""


class Saturation:
    """What batches of prompts take by their tokens, by SM count; each answer is sought once.

    Source: the knee is of Bullet Algorithm 1, line 12.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._tokens: dict[tuple[int, int], int] = {}
        self._token_us: dict[tuple[int, int], float] = {}
        self._within: dict[tuple[float, int, int], int] = {}

    def tokens(self, num_layers: int, num_sms: int) -> int:
        """The fewest tokens, a power of two, of which twice as many take twice as long."""
        key = num_layers, num_sms
        if key not in self._tokens:
            tokens = FEWEST
            while tokens < MOST and self._us(2 * tokens, key) < 2 * NEARLY * self._us(tokens, key):
                tokens *= 2
            self._tokens[key] = tokens
            self._token_us[key] = self._us(tokens, key) / tokens
        return self._tokens[key]

    def token_us(self, num_layers: int, num_sms: int) -> float:
        """Time of a token in a batch of so many."""
        self.tokens(num_layers, num_sms)
        return self._token_us[num_layers, num_sms]

    def tokens_within(self, us: float, num_layers: int, num_sms: int) -> int:
        """The most tokens, a power of two, whose prompts of 1,024 tokens take no longer than `us`,
        or 1,024."""
        key = us, num_layers, num_sms
        if key not in self._within:
            tokens = PROMPT
            while tokens < MOST and self._us(2 * tokens, key[1:], 2 * tokens // PROMPT) <= us:
                tokens *= 2
            self._within[key] = tokens
        return self._within[key]

    def _us(self, tokens: int, key: tuple[int, int], prompts: int = 1) -> float:
        layers, num_sms = key
        chunks = (Chunk(tokens // prompts),) * prompts
        return self._predictor.alone_us(Size(chunks, layers, layers), num_sms)
