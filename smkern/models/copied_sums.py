"""Sums of prompts over two GPUs that copy engines bring while products of other rows run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smkern.kernels.all_reduce.exchange import COPY_SLOTS
from smkern.kernels.all_reduce.one_shot import OneShotKernels
from smkern.kernels.all_reduce.peer_memory import Copies
from smkern.models.peer_sums import PeerSums
from smkern.ops.checks import dtype_name

LEAST_ROWS, MOST_ROWS = 2049, 8192
"""Rows of a layer that is cut in two. The runtime captures forwards of up to 2,048, behind runs
that load the kernels of the graph: those are not cut either."""
PIECE_ROWS = 5 * MOST_ROWS // 8
"""Rows of a piece, at most."""
TILE = 128, 256
"""Rows and columns of a product's tile, where rows are many."""


class CopiedSums(PeerSums):
    """`PeerSums` between two GPUs that cuts prompts' layers in two pieces of rows.

    A copy engine sends a piece's rows as soon as they are computed, while products of the other
    piece run; a kernel then adds what has come, in the order of ranks: to the same bits. An SM that
    holds a CTA of a product would have no room for one that sends. Captured forwards and other
    numbers of rows are summed as by `PeerSums`.

    Args:
        given, options: As of `PeerSums`.
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        tp, dtype, hidden = self._tp, self._dtype, self._hidden_size
        self._engine = torch.cuda.Stream(self._device)
        self._computed = [torch.cuda.Event() for _ in range(COPY_SLOTS)]
        self._copied = [torch.cuda.Event() for _ in range(COPY_SLOTS)]
        self._is_cut = False
        self._sent: deque[int] = deque()

        def made(at: list[int], slot_bytes: int) -> OneShotKernels:
            self._copies = Copies(tp.rank, at, slot_bytes)
            return OneShotKernels(
                tp.rank, at, slot_bytes, tp.timeout_s, dtype_name(dtype), hidden,
                self._capability, copied=True,
            )  # fmt: skip

        try:
            self._adds = self._opened(tp, PIECE_ROWS * hidden * dtype.itemsize, made, COPY_SLOTS)
        except Exception:  # on all ranks, or one is gone
            self.close()
            raise

    def all_reduce(self, x: Tensor) -> None:
        self._sent.clear()  # a layer that raised has sent them
        super().all_reduce(x)

    def pieces(self, num_rows: int, num_sms: int | None = None) -> Sequence[slice]:
        self._sent.clear()
        self._is_cut = (
            LEAST_ROWS <= num_rows <= MOST_ROWS and not torch.cuda.is_current_stream_capturing()
        )
        if not self._is_cut:
            return ()
        cut = cut_of(num_rows, self._hidden_size, self._place(num_sms)[1].num_sms)
        return slice(0, cut), slice(cut, num_rows)

    def send(self, x: Tensor) -> None:
        if not self._is_cut:
            return
        call = self._copies.begin()
        computed, copied = self._computed[call % COPY_SLOTS], self._copied[call % COPY_SLOTS]
        computed.record(torch.cuda.current_stream(self._device))
        self._engine.wait_event(computed)
        self._copies.send(call, self._engine.cuda_stream, x.data_ptr(), x.nbytes)
        copied.record(self._engine)
        self._sent.append(call)

    def _blocks(self, x: Tensor) -> Iterator[tuple[int, int]]:
        return iter([(0, x.shape[0])]) if self._sent else super()._blocks(x)

    def _launch(self, *given: Any, **options: Any) -> None:
        if not self._sent:
            super()._launch(*given, **options)
            return
        call = self._sent.popleft()
        # The sum writes where the copy reads.
        torch.cuda.current_stream(self._device).wait_event(self._copied[call % COPY_SLOTS])
        super()._launch(*given, **options, kernels=self._adds, call=call)


@cache
def cut_of(num_rows: int, width: int, num_sms: int) -> int:
    """Rows of the first of two pieces, 3/8 to 5/8 of them: where the products of both have fewest
    waves of tiles.

    Args:
        num_rows: Rows of both, more than a tile's.
        width: Columns of the products.
        num_sms: SMs that they run on.
    """
    down, across = -(-num_rows // TILE[0]), -(-width // TILE[1])

    def cost(first: int) -> tuple[int, int, int]:
        waves = sum(-(-tiles * across // num_sms) for tiles in (first, down - first))
        return waves, abs(down - 2 * first), -first

    return TILE[0] * min(range(3 * down // 8 or 1, 5 * down // 8 + 1), key=cost)
