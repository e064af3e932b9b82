"""Sums of a lane by one kernel over the memory of all GPUs, and by NCCL where rows are many."""

from __future__ import annotations

import torch
from torch import Tensor

from smkern.device import Budget, device_info
from smkern.errors import ArgumentError, DeviceError, RankError
from smkern.kernels.all_reduce.one_shot import (
    MAX_RANKS,
    MAX_WIDTH,
    Mode,
    OneShotKernels,
    memory_bytes,
)
from smkern.kernels.all_reduce.peer_memory import PeerMemory
from smkern.kernels.driver import may_overlap
from smkern.models.config import ModelConfig
from smkern.models.tensor_parallel import Collective, TensorParallel
from smkern.ops.checks import dtype_name
from smkern.partition import budget_of_stream

MAX_ROWS = 256
"""Rows of a call, at most: behind that the links are busy for longer than a launch takes."""


class OneShot(Collective):
    """Sums of decode steps in one launch each, fused with the residual and the norm behind them.

    Every GPU writes its rows to the others and adds what it was given in the order of ranks: all
    ranks have the same bits, and the grid does not matter. Calls are captured as any launch is. A
    lane has one of its own.

    Args:
        tp: The ranks, at most 8 GPUs of one host with peer access.
        hidden_size: Width of the rows, a multiple of 8 up to 16,384.
        dtype: bf16 or fp16.
        device: This rank's GPU.
        max_rows: Rows of a call, at most; longer ones go to the lane's own sums, `tp.decode`.

    Raises:
        ArgumentError: more ranks or wider rows than the kernel serves.
        DeviceError: GPUs that cannot reach each other's memory; on all ranks.

    Example:
        >>> tp.decode = OneShot(tp, config.hidden_size, config.dtype, device)  # doctest: +SKIP
    """

    def __init__(
        self,
        tp: TensorParallel,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int = MAX_ROWS,
    ) -> None:
        if tp.size > MAX_RANKS or hidden_size % 8 or hidden_size > MAX_WIDTH:
            raise ArgumentError(
                f"{tp.size} ranks with rows of {hidden_size}: the kernel sums over at most "
                f"{MAX_RANKS}, rows of whole 16 bytes up to {MAX_WIDTH} numbers; leave it out"
            )
        self._device, self._hidden_size, self._dtype = device, hidden_size, dtype
        self._max_rows = max_rows
        self._instead = tp.decode
        slot = max_rows * hidden_size * dtype.itemsize
        torch.cuda.current_stream(device).synchronize()  # the primary context is there
        memory = tp.together("allocating memory", lambda: PeerMemory(memory_bytes(tp.size, slot)))
        handles = tp.everyones(memory.handle)
        tp.together("mapping memory", lambda: memory.open(tp.rank, handles))
        self._memory = memory
        major, minor = device_info(device.index).capability
        self._capability = 10 * major + minor
        self._kernels = tp.together(
            "loading its kernels",
            lambda: OneShotKernels(
                tp.rank, memory.addresses, slot, dtype_name(dtype), hidden_size,
                self._capability, tp.timeout_s,
            ),
        )  # fmt: skip

    def all_reduce(self, x: Tensor) -> None:
        if self._serves(x):
            self._launch("sum", x, None)
        else:
            self._instead.all_reduce(x)

    def add(self, x: Tensor, residual: Tensor, *, num_sms: int | None = None) -> None:
        if self._serves(x):
            self._launch("add", x, num_sms, residual=residual.data_ptr())
        else:
            self._instead.add(x, residual, num_sms=num_sms)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, num_sms: int | None = None
    ) -> None:
        if self._serves(x):
            self._launch(
                "norm", x, num_sms, residual=residual.data_ptr(), weight=weight.data_ptr(),
                out=x.data_ptr(), eps=eps,
            )  # fmt: skip
        else:
            self._instead.add_rms_norm(x, residual, weight, eps=eps, num_sms=num_sms)

    def close(self) -> None:
        """Free the memory; nothing of it may run, on any rank."""
        self._memory.close()

    def _serves(self, x: Tensor) -> bool:
        return (
            x.dim() == 2 and x.shape[1] == self._hidden_size and 0 < x.shape[0] <= self._max_rows
            and x.dtype is self._dtype and x.is_contiguous()
        )  # fmt: skip

    def _launch(self, mode: Mode, x: Tensor, num_sms: int | None, **rest: float) -> None:
        index = self._device.index
        stream: int = torch._C._cuda_getCurrentRawStream(index)
        budget = budget_of_stream(stream, index)
        if num_sms is not None and num_sms < budget.num_sms:  # kept by the grid, not by a mask
            budget = Budget(num_sms)
        overlap = may_overlap(True, budget, self._capability)
        self._kernels.launch(
            mode, stream, x.shape[0], budget.num_sms, x.data_ptr(), overlap=overlap,
            **rest,  # type: ignore[arg-type]
        )  # fmt: skip


def fuse_decode(tp: TensorParallel, config: ModelConfig, device: torch.device) -> bool:
    """Let decode's sums be this kernel's where it serves them; otherwise they stay as they are.

    Args:
        tp: The ranks; all of them call this.
        config: The model.
        device: This rank's GPU.

    Returns:
        Whether they are.
    """
    try:
        tp.decode = OneShot(tp, config.hidden_size, config.dtype, device)
    except (ArgumentError, DeviceError, RankError):  # on all ranks, or on none
        return False
    return True
