"""Launches of `csrc/all_reduce/one_shot.cu`: a sum over ranks with what follows it, in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from smkern.kernels.all_reduce.exchange import COPY_SLOTS, VECTOR_BYTES, Exchange, ExchangeVariant

Mode = Literal["sum", "add", "norm"]
_MODES: dict[str, int] = {"sum": 0, "add": 1, "norm": 2}
GROUP = 256
"""Threads of a row: kGroup of the source."""
MAX_WIDTH = 8 * GROUP * VECTOR_BYTES // 2
"""Numbers of a row, at most: a thread holds 8 vectors of it."""


def one_shot_variant(
    ranks: int, dtype: str, mode: str, vectors: int, capability: int, copied: bool = False
) -> ExchangeVariant:
    """The kernel of a mode, for rows of which a thread holds so many vectors.

    Args:
        copied: Copy engines bring the others' rows, which the kernel adds.
    """
    defines: tuple[str, ...] = f"MODE={_MODES[mode]}", f"VECTORS={vectors}"
    if copied:
        defines += "COPIED=1", f"SLOTS={COPY_SLOTS}"
    return ExchangeVariant("one_shot", ranks, dtype, capability, defines)


class OneShotKernels(Exchange):
    """The kernels of one width of rows, loaded into the current context.

    Args:
        rank, addresses, slot_bytes, limit_s: As of `Exchange`.
        dtype: "bf16" or "fp16".
        width: Numbers of a row, a multiple of 8 up to 16,384.
        capability: Compute capability, such as 90.
        copied: Whether copy engines bring the others' rows.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        slot_bytes: int,
        limit_s: float,
        dtype: str,
        width: int,
        capability: int,
        copied: bool = False,
    ) -> None:
        super().__init__(rank, addresses, slot_bytes, limit_s)
        self._width = 2 * width // VECTOR_BYTES
        vectors = -(-self._width // GROUP)
        for mode in _MODES:
            variant = one_shot_variant(len(addresses), dtype, mode, vectors, capability, copied)
            self.load(mode, variant)

    def launch(
        self, mode: Mode, stream: int, rows: int, num_sms: int, x: int, *, residual: int = 0,
        weight: int = 0, out: int = 0, eps: float = 0.0, call: int = 0, overlap: bool = False,
    ) -> None:  # fmt: skip
        """Sum rows over the ranks, on at most `num_sms` SMs.

        Args:
            mode: "sum": into x; "add": into the residual; "norm": also its norm into out.
            stream: Raw stream handle.
            rows: Rows of x, the same on all ranks.
            num_sms: CTAs at most, the same on all ranks.
            x, residual, weight, out: Device addresses, rows without gaps.
            eps: Added to the mean of squares.
            call: Of copied rows, the number that came with them.
            overlap: Whether it may begin while the launch before it ends.
        """
        self.run(
            mode, stream, min(rows, num_sms), rows, self._width, x, residual, weight, out, eps=eps,
            call=call, overlap=overlap,
        )  # fmt: skip
