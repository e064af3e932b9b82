"""A whole model served by one GPU or several: prompts beside decode steps, split and chunked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from smkern.bench.ranks.rows import SERVED, TRIED, counted
from smkern.bench.runtime.cases import RuntimePlan
from smkern.bench.runtime.served_load import WORKLOAD, ServedLoad, open_load, sizes_of
from smkern.bench.runtime.workload import executor_of, load_kernels
from smkern.models import Decoder, TensorParallel, Weights, preset
from smkern.models.fused_sums import fuse_sums
from smkern.partition import ladder
from smkern.runtime.model.sizes import FIRST_CONTEXT
from smkern.runtime.ranks.channel import Links, open_links
from smkern.runtime.ranks.follower import follow
from smkern.runtime.ranks.leader import RankExecutor

PLAN = RuntimePlan(
    "qwen3-32b", (30, 50), (16, 18, 20, 24, 28, 32, 36, 40, 44, 48), (64,), served_ms=(30, 50),
    served_chunks=(192, 224, 256, 320, 448, 512, 544, 576, 608, 640, 768), served_pages=10_000,
)  # fmt: skip
"""Its pages have room for 64 requests and four prompts: so many of all layers fit one GPU of 141 GB
beside 32B."""
LOAD = replace(WORKLOAD, reach=48, lead=32)
"""Two windows of a figure's length: a step of the whole model takes 20 to 50 ms."""
PREHEAT_S, TRY_S, SERVED_S = 1.0, 2.5, 5.0
POLICIES = ("chunked", "static_split")
FIGURES = ("tbt_p50_ms", "tbt_p99_ms", "step_ms", "setting", "gaps", "sm_mhz", "watts", "compiled")


def served_cells(tp: TensorParallel, plan: RuntimePlan) -> Iterator[dict[str, Any]]:
    """On rank 0 each policy at its best under each limit, and what was tried for that; the others
    launch along, and give none.
    """
    with _opened(tp, plan) as load:
        if load is None:
            return
        for limit_ms in plan.served_ms:
            for policy in POLICIES:
                for found in load.row(policy, limit_ms, SERVED_S):
                    case = {k: v for k, v in found["case"].items() if k not in ("name", "limit")}
                    op = TRIED
                    if "limit" in found["case"]:
                        op, case["limit_ms"] = SERVED, limit_ms
                    figures = {k: found[k] for k in FIGURES if k in found}
                    yield counted(tp.size, op, case, found["value"], "tokens/ms", **figures)


@contextmanager
def _opened(tp: TensorParallel, plan: RuntimePlan) -> Iterator[ServedLoad | None]:
    config, sizes = preset(plan.model), sizes_of(plan)
    device = torch.device("cuda", torch.cuda.current_device())
    weights = Weights.random(config, device=device, shard=tp.shard)
    if tp.size == 1:
        with open_load(plan, weights, workload=LOAD, preheat_s=PREHEAT_S) as load:
            load.try_s = TRY_S
            yield load
        return
    decoder = Decoder(config, weights, tp=tp, max_position=sizes.max_context)
    fuse_sums(decoder)
    with ExitStack() as stack:
        steps = stack.enter_context(ladder(sizes.rungs))
        load_kernels(config, sizes, steps, tp.size)
        executor = stack.enter_context(executor_of(decoder, sizes, steps))
        executor.warm()
        contexts = [FIRST_CONTEXT, sizes.max_context]
        executor.capture([None, *sizes.rungs], [LOAD.running], contexts)
        tp.agree({"the decode graphs": sorted(executor.graphs.by_graph)})
        links = open_links(tp)
        if not isinstance(links, Links):
            follow(executor, links)
            yield None
            return
        ranked = RankExecutor(executor, links)
        try:
            yield ServedLoad(plan, ranked, LOAD, PREHEAT_S, TRY_S)  # type: ignore[arg-type]
        finally:
            links.close()
