"""From how many tokens on more prompts in a batch are computed no faster."""

from __future__ import annotations

from smkern.latency import Chunk, Size
from smkern.latency.predictor import Predictor

FEWEST, MOST = 128, 8192
NEARLY = 0.95
"""Of twice the time for twice the tokens."""


class Saturation:
    """The knee of the time of a prompt over its tokens, by SM count; each is sought once.

    Source: Bullet Algorithm 1, line 12.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._tokens: dict[tuple[int, int], int] = {}
        self._token_us: dict[tuple[int, int], float] = {}

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

    def _us(self, tokens: int, key: tuple[int, int]) -> float:
        layers, num_sms = key
        return self._predictor.alone_us(Size((Chunk(tokens),), layers, layers), num_sms)
