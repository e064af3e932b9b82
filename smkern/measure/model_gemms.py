"""Times of a model's GEMMs as a profile keeps them: by the tuned tables that it runs with."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from smkern.device import Budget
from smkern.latency.gemm_times import GemmTimes
from smkern.measure.forwards import problems_of
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.tuning.select import GEMM_FAMILY

if TYPE_CHECKING:
    from smkern.models import ModelConfig
    from smkern.profile import Profile


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


@contextmanager
def times_beside(config: ModelConfig, profile: Profile) -> Iterator[Callable[[], GemmTimes | None]]:
    """`gemm_times` in a process of its own, beside what goes on; yields what waits for it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool.submit(gemm_times, config, profile).result
