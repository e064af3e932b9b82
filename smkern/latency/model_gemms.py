"""A model's GEMMs, and their times by the tuned tables and the cost model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from smkern.device import Budget
from smkern.latency.gemm_times import GemmTimes
from smkern.tuning.config import Epilogue, GemmProblem
from smkern.tuning.select import GEMM_FAMILY

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig
    from smkern.profile import Profile


def problems_of(
    config: ModelConfig, tokens: int, batch: int, ranks: int = 1
) -> tuple[GemmProblem, ...]:
    """The GEMMs of a forward of so many tokens and requests, but for those on e4m3: these compile
    when they first run, and are few. Of a part that `ranks` GPUs share, sums are not added."""
    hidden, residual = config.hidden_size, Epilogue(residual=ranks == 1)
    whole = [GemmProblem(batch, config.vocab_size // ranks, hidden)]
    if config.moe is not None:
        whole.append(GemmProblem(tokens, config.moe.num_experts, hidden))
    if config.quantization is not None:
        return tuple(whole)
    found = [
        GemmProblem(tokens, config.qkv_size, hidden, epilogue=Epilogue(bias=config.qkv_bias)),
        GemmProblem(tokens, hidden, config.q_size, epilogue=residual),
        *whole,
    ]
    if config.moe is not None:
        return tuple(found)
    inner = config.intermediate_size
    found.append(GemmProblem(tokens, 2 * inner, hidden, epilogue=Epilogue(swiglu=True)))
    found.append(GemmProblem(tokens, hidden, inner, epilogue=residual))
    return tuple(found)


def gemm_times(
    config: ModelConfig, profile: Profile, sms: Iterable[int] | None = None
) -> GemmTimes | None:
    """What the tuned tables and the cost model say of a model's GEMMs.

    Args:
        config: The model.
        profile: The device; its tuned tables are read.
        sms: Counts of SMs; None: every even one from 8 on, which takes some 20 s.

    Returns:
        The times; None of experts and of e4m3, whose products other tables choose.
    """
    if config.moe is not None or config.quantization is not None:
        return None
    from smkern.ops.gemm.dispatch import offline_dispatcher  # loads torch

    total = profile.info.num_sms
    dispatcher = offline_dispatcher(profile, GEMM_FAMILY.load(profile))

    def us(rows: int, num_sms: int) -> tuple[float, float]:
        budget = Budget(num_sms, "mask", clusters=2 * num_sms > total)
        qkv, o, head, *mlp = [
            dispatcher.select(problem, budget).predicted_us
            for problem in problems_of(config, rows, min(rows, 256))
        ]
        return qkv + o + sum(mlp), head

    return GemmTimes.of([*range(8, total - 6, 2), total] if sms is None else list(sms), us)
