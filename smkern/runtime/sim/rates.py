"""A predictor of three numbers, where no measured table is wanted."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.latency import Size


@dataclass(frozen=True, slots=True)
class ConstantRates:
    """Prompts cost by the token and share of SMs, decode steps a part each for step, row and key.

    The defaults are of the order of an 8B model on an H200: 4,096 tokens in 150 ms, a step of 64
    rows of 2,048 keys in 9 ms, both on the whole device.

    Attributes:
        num_sms: SMs at which the rates hold; a prompt is so much slower as it has fewer.
        prefill_token_us: A prompt's token, through all layers.
        decode_us: A decode step without its rows.
        decode_row_us: A row of it.
        decode_key_us: A key that a row reads.
        decode_sms: SMs with which a decode step is as fast as with all; slower in proportion below.
        contention: How many times longer work takes beside other work.

    Example:
        >>> from smkern.latency import Chunk, Size
        >>> ConstantRates().alone_us(Size((Chunk(1000),), layers=18, num_layers=36), 66)
        37000.0
    """

    num_sms: int = 132
    prefill_token_us: float = 37.0
    decode_us: float = 5000.0
    decode_row_us: float = 10.0
    decode_key_us: float = 0.025
    decode_sms: int = 64
    contention: float = 1.0

    def alone_us(self, size: Size, num_sms: int) -> float:
        """Time of a launch with nothing beside it."""
        share = self.num_sms / num_sms
        prompts = self.prefill_token_us * size.new_tokens * size.layers / size.num_layers * share
        if not size.batch:
            return prompts
        step = self.decode_row_us * size.batch + self.decode_key_us * size.total_kv
        weights = 0.0 if size.chunks else self.decode_us  # read once for both
        step = (step + weights) * max(1.0, self.decode_sms / num_sms)
        return max(prompts + step, self.decode_us) if size.chunks else step

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """How many times longer it takes beside other work."""
        return self.contention
