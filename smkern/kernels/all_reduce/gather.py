"""Launches of `csrc/all_reduce/gather.cu`: the columns of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from smkern.kernels.all_reduce.exchange import THREADS, VECTOR_BYTES, Exchange, ExchangeVariant


def gather_variant(ranks: int, capability: int) -> ExchangeVariant:
    """The kernel; what it copies is of any dtype."""
    return ExchangeVariant("gather", ranks, "bf16", capability)


class GatherKernel(Exchange):
    """The kernel, loaded into the current context.

    Args:
        rank, addresses, slot_bytes, limit_s: As of `Exchange`.
        row_bytes: Bytes of a rank's part of a row, a multiple of 16.
        capability: Compute capability, such as 90.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        slot_bytes: int,
        limit_s: float,
        row_bytes: int,
        capability: int,
    ) -> None:
        super().__init__(rank, addresses, slot_bytes, limit_s)
        self._width = row_bytes // VECTOR_BYTES
        self.load("gather", gather_variant(len(addresses), capability))

    def launch(self, stream: int, rows: int, num_sms: int, x: int, *, overlap: bool) -> None:
        """Give all ranks the columns of each.

        Args:
            stream: Raw stream handle.
            rows: Rows of x, the same on all ranks.
            num_sms: CTAs at most, the same on all ranks.
            x: Device address of rows of all columns; this rank's part of each is there.
            overlap: Whether it may begin while the launch before it ends.
        """
        ctas = min(-(-rows * self._width // THREADS), num_sms)
        self.run("gather", stream, ctas, rows, self._width, x, 0, 0, 0, overlap=overlap)
