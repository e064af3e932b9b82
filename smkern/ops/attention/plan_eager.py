"""Plans made on one device: a look-up, then the launch; and their twin on the CPU."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smkern.kernels.attention.args import WorkspaceLayout
from smkern.kernels.attention.items import plan_items
from smkern.ops import checks
from smkern.ops.aliasing import layout, pointer
from smkern.ops.attention import check
from smkern.ops.attention.dispatch import AttentionDispatcher, attention_dispatcher
from smkern.ops.attention.plan import Plan, PlanNumbers, check_refill, empty_plan, shape_of_plan
from smkern.ops.bounded_cache import keep
from smkern.ops.streams import Streams, runtime_streams
from smkern.tuning.attention.shapes import AttentionShape, Budget

if TYPE_CHECKING:
    from smkern.kernels.attention.cuda import PlanLaunch


class EagerPlans:
    """Makes plans on one device."""

    def __init__(self, index: int, dispatcher: AttentionDispatcher, streams: Streams) -> None:
        self.index = index
        self.dispatcher = dispatcher
        self.streams = streams
        self._current_device = streams.current_device
        self._current_stream = streams.current_stream
        self._budget = streams.budget
        self._plans: dict[Any, tuple[AttentionShape, Budget, PlanLaunch | None]] = {}

    def plan(
        self, kv_lens: Tensor, cu_q_lens: Tensor | None, given: PlanNumbers, out: Plan | None,
        check_it: bool, num_sms: Any,
    ) -> Plan:  # fmt: skip
        """Make a plan, or `out` anew."""
        index = self.index
        if self._current_device() != index:
            with torch.cuda.device(index):
                return self.plan(kv_lens, cu_q_lens, given, out, check_it, num_sms)
        stream = self._current_stream(index)
        own = self._budget(stream, index)
        key = (layout(kv_lens), layout(cu_q_lens), given, num_sms, num_sms.__class__, own)
        try:
            found = self._plans.get(key)
        except TypeError:
            found = None
        if found is None:
            found = self._prepare_plan(key, kv_lens, cu_q_lens, given, num_sms, own)
        shape, budget, launch = found
        if out is None:
            made = empty_plan(shape, budget, kv_lens.device)
        else:
            made = out
            if out.__class__ is not Plan or out.shape is not shape or out.budget is not budget:
                check_refill(out, shape, budget, kv_lens.device)
        if check_it:
            checks.check_uncaptured(self.streams.capturing())
            check.check_lengths(kv_lens, cu_q_lens, shape)
        if launch is None:
            made.buffer.zero_()
        else:
            launch(
                kv_lens.data_ptr(), pointer(cu_q_lens), made.buffer.data_ptr(),
                made.workspace.data_ptr(), stream,
            )  # fmt: skip
        if check_it:
            check.check_plan(made)
        return made

    def stream_budget(self) -> Budget:
        """What the current stream has."""
        return self._budget(self._current_stream(self.index), self.index)

    def _prepare_plan(
        self, key: Any, kv_lens: Any, cu_q_lens: Any, given: PlanNumbers, num_sms: Any, own: Budget
    ) -> tuple[AttentionShape, Budget, PlanLaunch | None]:
        shape = shape_of_plan(kv_lens, cu_q_lens, given)
        budget = checks.resolve_budget(num_sms, own, self.dispatcher.profile.info.num_sms)
        launch = None
        if shape.batch:
            launch = self.dispatcher.plan(shape, budget, capturing=self.streams.capturing())
        keep(self._plans, key, (shape, budget, launch))
        return shape, budget, launch


@cache
def eager_plans(index: int) -> EagerPlans:
    """The plans of a device, made at its first and kept for the process."""
    return EagerPlans(index, attention_dispatcher(index), runtime_streams())


def host_budget(num_sms: Any) -> Budget:
    """The budget of a call on CPU tensors: what it says, 1 where it says nothing."""
    return Budget(1 if num_sms is None else checks.as_num_sms(num_sms), "grid", True)


def plan_here(
    kv_lens: Tensor, cu_q_lens: Tensor | None, given: PlanNumbers, out: Plan | None, check_it: bool,
    num_sms: Any,
) -> Plan:  # fmt: skip
    """The plan on the lengths' device: a GPU, or the CPU."""
    if kv_lens.is_cuda:
        eager = eager_plans(kv_lens.get_device())
        return eager.plan(kv_lens, cu_q_lens, given, out, check_it, num_sms)
    return plan_cpu(kv_lens, cu_q_lens, given, out, check_it, num_sms)


def plan_cpu(
    kv_lens: Tensor, cu_q_lens: Tensor | None, given: PlanNumbers, out: Any, check_it: bool,
    num_sms: Any,
) -> Plan:  # fmt: skip
    """The plan as Python makes it (`plan_items`), for CPU tensors."""
    shape = shape_of_plan(kv_lens, cu_q_lens, given)
    budget = host_budget(num_sms)
    if out is not None:
        check_refill(out, shape, budget, kv_lens.device)
        checks.check_writable("out.buffer", out.buffer)
        checks.check_writable("out.workspace", out.workspace)
    if check_it:
        check.check_lengths(kv_lens, cu_q_lens, shape)
    plan = empty_plan(shape, budget, kv_lens.device) if out is None else out
    starts = None if cu_q_lens is None else cu_q_lens.tolist()
    items = plan_items(shape, kv_lens.tolist(), starts, budget.num_sms)
    plan.buffer.copy_(torch.from_numpy(items))
    plan.workspace[: WorkspaceLayout.of(shape).decode_out].zero_()
    if check_it:
        check.check_plan(plan)
    return plan
