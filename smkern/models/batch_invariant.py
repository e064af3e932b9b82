"""What has no batch-invariant forward."""

from __future__ import annotations

import torch

from smkern.device import device_info
from smkern.errors import ConfigError
from smkern.models.config import ModelConfig
from smkern.tuning.attention.constraints import CUDA_CAPABILITY


def check_batch_invariant(config: ModelConfig, device: torch.device | None = None) -> None:
    """Raise ConfigError for a model or a GPU whose bits depend on more than a request.

    Args:
        config: A mixture of experts is refused: the grouped GEMM's configuration depends on the
            number of rows and the budget.
        device: A GPU whose attention is Triton's is refused: a row walks as far as its tile's
            last, and each step behind its own keys scales its sums by 1 only to a rounding. Which
            rows share a tile follows from where a prompt is cut and from `max_q_len`.
    """
    if config.moe is not None:
        raise ConfigError(
            f"batch_invariant=True of a model with {config.moe.num_experts} experts: the grouped "
            "GEMM sums in an order that depends on the batch; take a dense model, or leave it out"
        )
    if device is None or device.type != "cuda":
        return
    info = device_info(device.index)
    if info.capability != CUDA_CAPABILITY:
        raise ConfigError(
            f"batch_invariant=True on an sm_{info.sm}: attention's bits follow the longest query "
            f"of the batch there; take an sm_{CUDA_CAPABILITY[0]}{CUDA_CAPABILITY[1]}, or leave it "
            "out"
        )
