"""Sums of a lane by one kernel over the memory of all GPUs; by NCCL where many ranks sum much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from smkern.device import Budget, device_info
from smkern.errors import ArgumentError, RankError
from smkern.kernels.all_reduce.exchange import (
    MAX_RANKS,
    SLOTS,
    VECTOR_BYTES,
    Exchange,
    memory_bytes,
)
from smkern.kernels.all_reduce.gather import GatherKernel
from smkern.kernels.all_reduce.one_shot import MAX_WIDTH, Mode, OneShotKernels
from smkern.kernels.all_reduce.peer_memory import PeerMemory
from smkern.kernels.driver import may_overlap
from smkern.models.tensor_parallel import Collective, TensorParallel
from smkern.ops.checks import dtype_name
from smkern.partition import budget_of_stream

MAX_ROWS = 256
"""Rows of a call among more than two GPUs, at most: each sends all of its rows to every other one,
where NCCL's ring sends less than twice them in all."""
PAIR_ROWS = 4096
"""Rows of a call between two GPUs, which send each other as much either way."""
LOGIT_ROWS = {"decode": 64, "prefill": 16}
"""Rows of logits that a launch exchanges; of more there are more launches."""

Kernels = TypeVar("Kernels", bound=Exchange)


class PeerSums(Collective):
    """Sums over the GPUs of a host in one launch each, fused with the residual and the norm behind.

    Every GPU writes its rows to the others and adds what it was given in the order of ranks: all
    ranks have the same bits, and neither the grid nor the rows beside a row matter. Calls are
    captured as any launch is. A lane has one of its own.

    Args:
        tp: The ranks, at most 8 GPUs of one host with peer access.
        instead: Sums what this does not serve.
        hidden_size: Width of the rows, a multiple of 8 up to 16,384.
        vocab_size: Columns of the logits.
        dtype: bf16 or fp16.
        device: This rank's GPU.
        max_rows: Rows of a launch.
        longer: Whether more rows are summed by more launches; else by `instead`.
        logit_rows: Rows of logits of a launch.

    Raises:
        ArgumentError: more ranks or wider rows than the kernel serves.
        DeviceError: GPUs that cannot reach each other's memory; on all ranks.

    Example:
        >>> tp.decode = PeerSums(                                              # doctest: +SKIP
        ...     tp, tp.decode, config.hidden_size, config.vocab_size, config.dtype, device)
    """

    def __init__(
        self,
        tp: TensorParallel,
        instead: Collective,
        hidden_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int = MAX_ROWS,
        longer: bool = False,
        logit_rows: int = LOGIT_ROWS["decode"],
    ) -> None:
        if tp.size > MAX_RANKS or hidden_size % 8 or hidden_size > MAX_WIDTH:
            raise ArgumentError(
                f"{tp.size} ranks with rows of {hidden_size}: the kernel sums over at most "
                f"{MAX_RANKS}, rows of whole 16 bytes up to {MAX_WIDTH} numbers; leave it out"
            )
        self._tp, self._device = tp, device
        self._hidden_size, self._dtype = hidden_size, dtype
        self._vocab_size, self._logit_rows = vocab_size, logit_rows
        self._max_rows, self._longer, self._instead = max_rows, longer, instead
        capability = self._capability = device_info(device.index).sm
        torch.cuda.current_stream(device).synchronize()  # the primary context is there
        self._memories: list[PeerMemory] = []
        self._gather: GatherKernel | None = None
        row_bytes = vocab_size // tp.size * dtype.itemsize
        try:
            self._sums = self._opened(
                tp, max_rows * hidden_size * dtype.itemsize,
                lambda at, slot: OneShotKernels(
                    tp.rank, at, slot, tp.timeout_s, dtype_name(dtype), hidden_size, capability
                ),
            )  # fmt: skip
            if row_bytes % VECTOR_BYTES == 0 and logit_rows:
                self._gather = self._opened(
                    tp, logit_rows * row_bytes,
                    lambda at, slot: GatherKernel(
                        tp.rank, at, slot, tp.timeout_s, row_bytes, capability
                    ),
                )  # fmt: skip
        except Exception:  # on all ranks, or one is gone
            self.close()
            raise

    def all_reduce(self, x: Tensor) -> None:
        if self._serves(x):
            for first, rows in self._blocks(x):
                self._launch("sum", x, first, rows, None)
        else:
            self._instead.all_reduce(x)

    def add(self, x: Tensor, residual: Tensor, *, num_sms: int | None = None) -> None:
        if self._serves(x):
            for first, rows in self._blocks(x):
                self._launch("add", x, first, rows, num_sms, residual=residual)
        else:
            self._instead.add(x, residual, num_sms=num_sms)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, num_sms: int | None = None
    ) -> None:
        if self._serves(x):
            for first, rows in self._blocks(x):
                self._launch(
                    "norm", x, first, rows, num_sms, residual=residual, out=x,
                    weight=weight.data_ptr(), eps=eps,
                )  # fmt: skip
        else:
            self._instead.add_rms_norm(x, residual, weight, eps=eps, num_sms=num_sms)

    def gather(self, x: Tensor, columns: range, *, num_sms: int | None = None) -> None:
        kernel = self._gather
        if kernel is None or x.dim() != 2 or x.shape[1] != self._vocab_size or not self._is_ours(x):
            self._instead.gather(x, columns, num_sms=num_sms)
            return
        stream, budget, overlap = self._place(num_sms)
        row_bytes = x.shape[1] * x.element_size()
        for first in range(0, x.shape[0], self._logit_rows):
            rows = min(x.shape[0] - first, self._logit_rows)
            kernel.launch(
                stream, rows, budget.num_sms, x.data_ptr() + first * row_bytes, overlap=overlap
            )

    def close(self) -> None:
        """Free the memory; nothing of it may run, on any rank. All ranks call this."""
        for memory in self._memories:
            memory.unmap()
        with suppress(RankError):  # one is gone
            self._tp.everyones(None)  # what another has mapped is not to be freed
        for memory in self._memories:
            memory.close()
        self._memories = []

    def _opened(
        self, tp: TensorParallel, slot_bytes: int, make: Callable[[list[int], int], Kernels],
        slots: int = SLOTS,
    ) -> Kernels:  # fmt: skip
        """Kernels over memory that all ranks have mapped; what was taken is in `_memories`."""

        def taken() -> PeerMemory:
            self._memories.append(PeerMemory(memory_bytes(tp.size, slot_bytes, slots)))
            return self._memories[-1]

        memory = tp.together("allocating memory", taken)
        handles = tp.everyones(memory.handle)
        tp.together("mapping memory", lambda: memory.open(tp.rank, handles))
        return tp.together("loading its kernels", lambda: make(memory.addresses, slot_bytes))

    def _is_ours(self, x: Tensor) -> bool:
        return x.dtype is self._dtype and x.is_contiguous() and x.shape[0] > 0

    def _serves(self, x: Tensor) -> bool:
        return (
            x.dim() == 2 and x.shape[1] == self._hidden_size and self._is_ours(x)
            and (self._longer or x.shape[0] <= self._max_rows)
        )  # fmt: skip

    def _blocks(self, x: Tensor) -> Iterator[tuple[int, int]]:
        """The rows of each launch: the first of them, and how many."""
        total = x.shape[0]
        for first in range(0, total, self._max_rows):
            yield first, min(total - first, self._max_rows)

    def _place(self, num_sms: int | None) -> tuple[int, Budget, bool]:
        """The current stream, the SMs of a launch on it, and whether it may overlap."""
        index = self._device.index
        stream: int = torch._C._cuda_getCurrentRawStream(index)
        budget = budget_of_stream(stream, index)
        if num_sms is not None and num_sms < budget.num_sms:  # kept by the grid, not by a mask
            budget = Budget(num_sms)
        return stream, budget, may_overlap(True, budget, self._capability)

    def _launch(
        self, mode: Mode, x: Tensor, first: int, rows: int, num_sms: int | None, *,
        residual: Tensor | None = None, weight: int = 0, out: Tensor | None = None,
        eps: float = 0.0, kernels: OneShotKernels | None = None, call: int = 0,
    ) -> None:  # fmt: skip
        stream, budget, overlap = self._place(num_sms)
        skipped = first * self._hidden_size * x.element_size()

        def at(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr() + skipped

        (kernels or self._sums).launch(
            mode, stream, rows, budget.num_sms, at(x), residual=at(residual), weight=weight,
            out=at(out), eps=eps, call=call, overlap=overlap and kernels is None,
        )  # fmt: skip
