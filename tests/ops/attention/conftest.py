"""A device that is not there: CPU tensors stand for its memory, fake kernels work on addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smkern.kernels.attention.args import NUM_ADDRESSES, AttentionArguments, WorkspaceLayout
from smkern.kernels.attention.cuda import variant_of, violations
from smkern.kernels.attention.items import PlanLayout, plan_items
from smkern.kernels.attention.triton_compile import variants_of
from smkern.ops.attention.call import Call
from smkern.ops.attention.dispatch import AttentionDispatcher
from smkern.ops.attention.paged import ATTENTION
from smkern.ops.attention.plan import PlanNumbers
from smkern.ops.attention.plan_eager import EagerPlans
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.reference import attention as reference
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget
from tests.ops.conftest import FakeProfile, memory, streams_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def vector(pointer: int, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return memory(pointer, (count,), (1,), dtype)


@dataclass
class FakeKernels:
    """Prepares fake launches, and counts what would have been compiled and launched."""

    loaded: set[Any] = field(default_factory=set)
    plan_loaded: bool = False
    prepared: list[tuple[AttentionProblem, AttentionConfig, Budget]] = field(default_factory=list)
    planned: list[tuple[AttentionShape, Budget]] = field(default_factory=list)
    launches: list[tuple[str, int, Any]] = field(default_factory=list)
    lengths: dict[int, Any] = field(default_factory=dict)

    def is_plan_loaded(self) -> bool:
        return self.plan_loaded

    def plan(self, shape: AttentionShape, budget: Budget) -> Any:
        self.plan_loaded = True
        self.planned.append((shape, budget))

        def launch(kv_lens: int, cu_q_lens: int, plan: int, workspace: int, stream: int) -> None:
            lens = vector(kv_lens, shape.batch).clone()
            cu = vector(cu_q_lens, shape.batch + 1).clone() if cu_q_lens else None
            starts = None if cu is None else cu.tolist()
            items = plan_items(shape, lens.tolist(), starts, budget.num_sms)
            vector(plan, PlanLayout.of(shape).words).copy_(torch.from_numpy(items))
            vector(workspace, WorkspaceLayout.of(shape).num_bytes, torch.uint8).zero_()
            self.lengths[plan] = lens, cu
            self.launches.append(("plan", stream, plan))

        return launch

    def variants(
        self, problem: AttentionProblem, config: AttentionConfig, aligned: bool = True
    ) -> Any:
        """As real ones: what chooses code of a problem, and nothing that a budget chooses."""
        if config.kernel == "cuda":
            return (variant_of(problem, config, 90),)
        return variants_of(problem, config, 90, aligned)

    def is_loaded(
        self, problem: AttentionProblem, config: AttentionConfig, aligned: bool = True
    ) -> bool:
        return self.loaded.issuperset(self.variants(problem, config, aligned))

    def prepare(
        self,
        problem: AttentionProblem,
        config: AttentionConfig,
        budget: Budget,
        aligned: bool = True,
    ) -> Any:
        self.loaded.update(self.variants(problem, config, aligned))
        self.prepared.append((problem, config, budget))

        def bind(sizes: Any) -> Any:
            def launch(stream: int, *addresses: int) -> None:
                args = AttentionArguments.of(addresses[:NUM_ADDRESSES], sizes)
                self.launches.append((config.kernel, stream, args))
                attend(problem, args, *self.lengths[args.plan])

            return launch

        return bind


def attend(problem: AttentionProblem, a: AttentionArguments, lens: Any, cu: Any) -> None:
    """What a kernel does with its arguments; the plan's lengths count."""
    s, dtype, cache = problem.shape, DTYPES[problem.dtype], DTYPES[problem.cache_dtype]
    heads = (a.num_tokens, s.num_q_heads, s.head_dim)
    pages = (a.num_pages, s.page_size, s.num_kv_heads, s.head_dim)
    table = (
        vector(a.page_table, a.table_len)
        if a.page_indptr
        else memory(a.page_table, (s.batch, a.table_len), (a.table_stride, 1), torch.int32)
    )
    lse = torch.empty(heads[:2]) if not a.lse else vector(a.lse, heads[0] * heads[1], torch.float32)
    scales = [
        vector(pointer, 1, torch.float32) * scale if pointer else scale
        for pointer, scale in ((a.k_scale_ptr, a.k_scale), (a.v_scale_ptr, a.v_scale))
    ]
    reference.paged_attention(
        memory(a.q, heads, (*a.q_strides, 1), dtype),
        memory(a.k, pages, (*a.k_strides, 1), cache),
        memory(a.v, pages, (*a.v_strides, 1), cache),
        table, lens,
        page_indptr=vector(a.page_indptr, s.batch + 1) if a.page_indptr else None,
        cu_q_lens=cu, max_q_len=s.max_q_len, max_kv_len=s.max_kv_len, causal=s.causal,
        scale=a.scale, window=s.window or None, softcap=a.softcap if problem.softcap else None,
        sinks=vector(a.sinks, s.num_q_heads, torch.float32) if problem.sinks else None,
        k_scale=scales[0], v_scale=scales[1],
        out=memory(a.out, heads, (*a.out_strides, 1), dtype), lse=lse.view(heads[:2]),
    )  # fmt: skip


def select(problem: Any, budget: Any, profile: Any, table: Any = None, backend: Any = None) -> Any:
    """The named kernel, CUDA's by default; a table names its own."""
    kernel = backend or (table if table is not None else "cuda")
    return SimpleNamespace(config=AttentionConfig(kernel), source="model")


class FakeDevice:
    """One device: its dispatcher, its streams (a number each) and whether a capture is on."""

    def __init__(
        self, capability: tuple[int, int] = (9, 0), table: Any = None, choose: Any = select
    ) -> None:
        self.kernels = FakeKernels()
        self.stream, self.is_capturing = 7, False
        self.budgets = {7: Budget(132, "grid", True), 8: Budget(32, "mask", False)}
        profile: Any = FakeProfile(capability)
        self.dispatcher = AttentionDispatcher(
            profile, lambda: self.kernels, choose, violations, table
        )
        streams = streams_of(self)
        self.eager = EagerOperator(ATTENTION, -1, self.dispatcher, streams)
        self.plans = EagerPlans(-1, self.dispatcher, streams)

    def attend(self, *args: Any, **options: Any) -> Any:
        """As `paged_attention`: (out, lse)."""
        defaults = dict.fromkeys(Call._fields[5:]) | {"causal": True}
        defaults |= {"return_lse": False, "check": False}
        return self.eager(Call(*args, **(defaults | options)))

    def plan(self, kv_lens: Any, **options: Any) -> Any:
        """As `plan_attention`."""
        defaults = dict.fromkeys(PlanNumbers._fields) | {"causal": True, "max_q_len": 1}
        rest = [options.pop(name, None) for name in ("cu_q_lens", "out", "check", "num_sms")]
        cu, out, check, num_sms = rest
        return self.plans.plan(
            kv_lens, cu, PlanNumbers(**(defaults | options)), out, check, num_sms
        )


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def make_device() -> type[FakeDevice]:
    """The class itself, for a device that differs from the default."""
    return FakeDevice
