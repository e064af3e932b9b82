"""A model on its ladder, kernels compiled: what subjects measure with on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from smkern.bench.compiling import dispatcher_of, precompile, settled_problem
from smkern.bench.model.cases import ModelPlan
from smkern.bench.model.model import Model
from smkern.bench.model.prepare import problems_of
from smkern.bench.runtime.cases import OURS, STOCK_RUNGS, RuntimePlan
from smkern.bench.runtime.ours import Ours
from smkern.bench.runtime.rig import Rig
from smkern.bench.runtime.side import Side
from smkern.bench.runtime.stamps import stamps_on
from smkern.device import Budget, device_info
from smkern.models import ModelConfig, Weights, preset
from smkern.partition import Ladder, ladder
from smkern.runtime.cuda_device import CudaDevice


def made_model(plan: RuntimePlan) -> Model:
    """A model of random weights with its caches on the GPU; both providers' kernels read them."""
    return Model(ModelPlan(plan.model, (plan.batch,), plan.tokens))


def made_weights(plan: RuntimePlan, layers: int | None) -> Weights:
    """Random weights of the model, or of one of its widths with so many layers."""
    config = preset(plan.model)
    if layers is not None:
        config = config.replace(num_layers=layers)
    return Weights.random(config, device="cuda")


@contextmanager
def open_rig(model: Model, plan: RuntimePlan, provider: str, seconds: float) -> Iterator[Rig]:
    """A provider's side of a model on its ladder; closed with all that was captured."""
    with ladder_of(plan, provider) as made:
        device = CudaDevice(made)
        where = torch.device("cuda", device.index)
        decode_marks, prefill_marks = stamps_on(where), stamps_on(where)
        side: Side
        if provider == OURS:
            compile_all(model.config, plan, made)
            side = Ours(plan, model, decode_marks, device.partition)
        else:
            from smkern.bench.runtime.stock import Stock

            side = Stock(plan, model, decode_marks, device.partition)
        try:
            yield Rig(plan, side, device, decode_marks, prefill_marks, seconds)
        finally:
            device.synchronize()
            side.close()


def ladder_of(plan: RuntimePlan, provider: str) -> Ladder:
    """Our kernels want spread SMs; cuBLAS's need clusters, which the driver's own groups have."""
    if provider == OURS:
        return ladder(plan.rungs)
    return ladder(STOCK_RUNGS[plan.model], atom=8, placement="default")


def compile_all(config: ModelConfig, plan: RuntimePlan, made: Ladder) -> int:
    """Compile side by side the GEMMs of every step, prompt and mixed forward; how many."""
    whole = device_info().num_sms
    decode = [Budget(whole, "mask", clusters=True), *(split.decode.budget for split in made)]
    prefill = [decode[0], *(split.prefill.budget for split in made)]
    steps = problems_of(config, plan.batch, plan.batch)
    prompts = problems_of(config, plan.tokens, 1)
    mixed = [
        problem
        for chunk in plan.chunks
        for problem in problems_of(config, chunk + plan.batch, plan.batch + 2)
    ]
    wanted = [
        *((problem, budget) for budget in decode for problem in steps),
        *((problem, budget) for budget in prefill for problem in prompts),
        *((problem, decode[0]) for problem in mixed),
    ]
    ready = [
        (settled_problem(problem, budget), budget, None)
        for problem, budget in dict.fromkeys(wanted)
    ]
    return precompile(dispatcher_of(), ready)
