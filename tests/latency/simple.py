"""A predictor that is easily computed by hand."""

from __future__ import annotations

from smkern.latency import Size


class Linear:
    """1,000 us and 10 us a token on 100 SMs, in proportion to layers and inversely to SMs."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        us = 1000.0 + 10.0 * (size.new_tokens + size.batch)
        return us * size.layers / size.num_layers * 100 / num_sms

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 1.25
