"""A model's GEMMs, and their times by the tuned tables and the cost model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from smkern.device import Budget
from smkern.latency.cost import Load, kernels_of
from smkern.latency.gemm_times import GemmTimes
from smkern.tuning.config import Epilogue, GemmProblem
from smkern.tuning.fp8 import ScaledProblem, serves_gated
from smkern.tuning.select import GEMM_FAMILY

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig
    from smkern.profile import Profile


def problems_of(
    config: ModelConfig, tokens: int, batch: int, ranks: int = 1
) -> tuple[GemmProblem, ...]:
    """The GEMMs of a forward of so many tokens and requests, the head's first, but for those on
    e4m3: these compile when they first run, and are few. Of a part that `ranks` GPUs share, sums
    are not added."""
    hidden, residual = config.hidden_size, Epilogue(residual=ranks == 1)
    whole = [GemmProblem(batch, config.vocab_size // ranks, hidden)]
    if config.moe is not None:
        whole.append(GemmProblem(tokens, config.moe.num_experts, hidden))
    if config.quantization is not None:
        return tuple(whole)
    whole += [
        GemmProblem(tokens, config.qkv_size, hidden, epilogue=Epilogue(bias=config.qkv_bias)),
        GemmProblem(tokens, hidden, config.q_size, epilogue=residual),
    ]
    if config.moe is not None:
        return tuple(whole)
    inner = config.intermediate_size
    return (
        *whole,
        GemmProblem(tokens, 2 * inner, hidden, epilogue=Epilogue(swiglu=True)),
        GemmProblem(tokens, hidden, inner, epilogue=residual),
    )


def scaled_problems_of(
    config: ModelConfig, tokens: int, capability: tuple[int, int]
) -> Iterator[ScaledProblem]:
    """The products on e4m3 of a layer without experts, of so many tokens; none of other models."""
    by_blocks = config.quantization is not None and config.quantization.kind == "fp8-block"
    for kernel in kernels_of(config, Load(tokens, 0, 0, 0), l2_bytes=0, layers=1):
        if kernel.product is None or kernel.flop_rate == 1:
            continue
        m, n, k, epilogue = kernel.product
        plain, gated = Epilogue(residual=epilogue == "residual"), Epilogue(swiglu=True)
        found = ScaledProblem(m, n, k, epilogue=plain, scales="block" if by_blocks else "row")
        fuses = epilogue == "swiglu" and serves_gated(found, capability)
        yield replace(found, epilogue=gated) if fuses else found


def budgets_of(total: int, sms: Iterable[int] | None = None) -> list[Budget]:
    """Sides of splits of a device of `total` SMs, and the device: clusters launch on the larger
    sides alone. `sms`: of so many; None: every even one from 8 on that leaves as many, and all."""
    counts = [*range(8, total - 6, 2), total] if sms is None else sms
    return [Budget(num_sms, "mask", clusters=2 * num_sms > total) for num_sms in counts]


def gemm_times(
    config: ModelConfig, profile: Profile, sms: Iterable[int] | None = None
) -> GemmTimes | None:
    """What the tuned tables and the cost model say of a model's GEMMs.

    Args:
        config: The model.
        profile: The device; its tuned tables are read.
        sms: Counts of SMs; None: every even one from 8 on, which takes 20 s to a minute.

    Returns:
        The times; None of experts, whose products other tables choose.
    """
    if config.moe is not None:
        return None
    from smkern.ops.fp8 import dispatch as fp8_dispatch  # load torch
    from smkern.ops.gemm.dispatch import offline_dispatcher

    info = profile.info
    dispatcher = offline_dispatcher(profile, GEMM_FAMILY.load(profile))
    scaled = fp8_dispatch.offline_dispatcher(profile)

    def us(rows: int, num_sms: int) -> tuple[float, float]:
        budget = budgets[num_sms]
        head, *layer = [
            dispatcher.select(problem, budget).predicted_us
            for problem in problems_of(config, rows, min(rows, 256))
        ]
        for problem in scaled_problems_of(config, rows, info.capability):
            layer.append(scaled.predicted_us(problem, budget))
        return sum(layer), head

    budgets = {budget.num_sms: budget for budget in budgets_of(info.num_sms, sms)}
    return GemmTimes.of(list(budgets), us)
