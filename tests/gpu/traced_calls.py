"""Calls of append, rows, experts and sampler whose launches leave counts of CTAs by SM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

import smkern
from smkern.device import Budget
from smkern.kernels.append_launch import AppendKernels
from smkern.kernels.grouped_launch import GroupedKernels
from smkern.kernels.moe_launch import MoeKernels
from smkern.kernels.rows_launch import RowsKernels
from smkern.kernels.sample import SampleKernels
from smkern.ops.append.call import Call
from smkern.ops.append.operators import APPEND
from smkern.ops.moe.grouped import GROUPED, Grouped
from smkern.ops.moe.permute import PERMUTE, Permute
from smkern.ops.moe.route import TOPK, Topk
from smkern.ops.moe.unpermute import UNPERMUTE, Unpermute
from smkern.ops.operator_warmup import aligned
from smkern.ops.reference import moe as reference
from smkern.ops.rows.call import numbers_of, problem_of
from smkern.ops.sample import call as sampling
from smkern.ops.sample.operators import SAMPLE
from smkern.rope import Rope
from smkern.tuning.append import AppendConfig
from smkern.tuning.grouped import configs_of
from smkern.tuning.moe import MoeConfig
from smkern.tuning.rows import RowsConfig
from smkern.tuning.sample import SampleConfig, workspace_bytes
from tests.gpu import append_support, rows_support
from tests.gpu.bits import same_bits
from tests.gpu.gemm_support import capability
from tests.gpu.moe_support import BF16, NAN, given_of, routed
from tests.gpu.smid_trace import TRACE_WORDS, Notes, traced_sources
from tests.ops.append_cases import Case, make, problem
from tests.ops.sample_cases import logits_of, options_of

APPEND_CASE = Case(((700, 900), (1, 40), (300, 300), (8, 64)), q_heads=32, kv_heads=8, head_dim=128,
                   dtype=torch.bfloat16, rope=Rope(128), norm=True)  # fmt: skip
WIDTH, ROWS = 4096, 700
TOKENS, EXPERTS, TOP_K, HIDDEN, INNER = 700, 32, 4, 1024, 256
TRACE_AT = 32_768
"""Byte of the sampler's counters' room where the counts begin; few rows have counters before it."""


class Traced:
    """A call's launch by a configuration in a budget."""

    launches = 1
    """Launches of one call, each within the budget."""
    plans = 0
    """Further launches, of one CTA."""
    notes: Notes
    _launch: Callable[..., None]
    _given: tuple[Any, ...]

    def launch(self, stream: int) -> None:
        self._launch(stream, *self._given)

    def smids(self) -> Counter[int]:
        return self.notes.smids()


class TracedAppend(Traced):
    def __init__(self, config: AppendConfig, budget: Budget) -> None:
        self.made = make(APPEND_CASE, "cuda")
        self.out = torch.full_like(self.made[0][0], torch.nan)
        self.notes = Notes()
        with self.notes.compiling():
            found = problem(self.made)
            self._launch = AppendKernels(capability()).prepare(found, config, budget)
        call = Call(*self.made[0], **self.made[1], out=self.out)
        self._given = (*APPEND.addresses(call), *APPEND.numbers(call))
        torch.cuda.synchronize()

    def reset(self) -> None:
        for x in (self.out, *self.made[0][3:5]):
            x.fill_(torch.nan)
        torch.cuda.synchronize()

    def check(self) -> None:
        made = append_support.cloned(self.made)
        made[0][3].fill_(torch.nan)
        made[0][4].fill_(torch.nan)
        append_support.check(made, self.made, self.out)


class TracedRows(Traced):
    def __init__(self, op: str, config: RowsConfig, budget: Budget) -> None:
        self.fresh = rows_support.make(op, ROWS, WIDTH)
        self.call: Any = rows_support.cloned(self.fresh)
        self.notes = Notes()
        problem = problem_of(self.call, True)
        assert problem is not None
        with self.notes.compiling():
            self._launch = RowsKernels(capability()).prepare(problem, config, budget)
        addresses = [x.data_ptr() for x in self.call if isinstance(x, torch.Tensor)]
        self._given = (*addresses, *numbers_of(self.call))
        torch.cuda.synchronize()

    def reset(self) -> None:
        for x, y in zip(self.call, self.fresh, strict=True):
            if isinstance(x, torch.Tensor):
                x.copy_(y)
        torch.cuda.synchronize()

    def check(self) -> None:
        rows_support.check(self.fresh, self.call)


def experts_call(name: str) -> tuple[Any, Any, Any]:
    """An operator, a call of it with poisoned results, and a configuration."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda").to(BF16)
    experts = routed(TOKENS, EXPERTS, TOP_K)
    offsets, index = reference.places(experts, EXPERTS)
    count = TOKENS * TOP_K
    rows = torch.randn(count, HIDDEN, device="cuda").to(BF16)
    weights = torch.rand(TOKENS, TOP_K, device="cuda")
    if name == "topk_softmax":
        out = torch.empty_like(weights), torch.empty_like(experts)
        return TOPK, Topk(x[:, :EXPERTS], TOP_K, True, *out), MoeConfig(4, 8)
    if name.startswith("moe_permute"):
        given = (torch.empty_like(y) for y in (rows, offsets, index))
        config = MoeConfig(4, 4, counted=name.endswith("counted"))
        return PERMUTE, Permute(x, experts, EXPERTS, *given), config
    if name == "moe_unpermute":
        call: Any = Unpermute(rows, index, weights, x, torch.empty_like(x))
        return UNPERMUTE, call, MoeConfig(16, 2)
    swiglu = name.endswith("swiglu")
    w = torch.randn(EXPERTS, INNER * (1 + swiglu), HIDDEN, device="cuda").mul_(0.03).to(BF16)
    out = torch.empty(count, INNER, device="cuda", dtype=BF16)
    call = Grouped(rows, w, offsets, swiglu, out=out)
    problem = GROUPED.problem(call, True)
    assert problem is not None
    # two CTAs an SM, and a large one
    return GROUPED, call, configs_of(problem, capability())[1 if swiglu else -1]


class TracedExperts(Traced):
    def __init__(self, name: str, budget: Budget) -> None:
        torch.manual_seed(1)
        self.op, self.call, config = experts_call(name)
        self.notes = Notes()
        self.launches = 2 if name == "moe_permute-counted" else 1
        problem = self.op.problem(self.call, aligned(self.op, self.call))
        kernels: Any = GroupedKernels if self.op is GROUPED else MoeKernels
        with self.notes.compiling():
            self._launch = kernels(capability()).prepare(problem, config, budget)
        self._scratch = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")
        self._given = given_of(self.op, self.call, problem, self._scratch)
        self._wanted: list[torch.Tensor] = []
        self.reset()

    def reset(self) -> None:
        for x in self.op.results_of(self.call):
            x.fill_(-9 if x.dtype is torch.int32 else NAN)
        torch.cuda.synchronize()

    def check(self) -> None:
        """Every run has the same bits, and the first is right."""
        torch.cuda.synchronize()
        found = [x.clone() for x in self.op.results_of(self.call)]
        if not self._wanted:
            blank = self.call._replace(**dict.fromkeys(self.op.results, None))
            on_host = blank._replace(
                **{n: x.cpu() for n, x in blank._asdict().items() if isinstance(x, torch.Tensor)}
            )
            want = self.op.reference(on_host)
            want = want if isinstance(want, tuple) else (want,)
            for got, x in zip(found, want, strict=True):
                torch.testing.assert_close(got.cpu(), x, rtol=2e-2, atol=2e-2)
            self._wanted = found
        assert all(same_bits(x, y) for x, y in zip(found, self._wanted, strict=True))


@cache
def _sample_kernels() -> SampleKernels:
    """Loaded only by traced calls."""
    return SampleKernels(capability())


class TracedSample(Traced):
    def __init__(self, config: SampleConfig, budget: Budget) -> None:
        logits, options = logits_of(24, 151_936, BF16).cuda(), options_of("mixed", 24, "cuda")
        self.want = smkern.sample(logits, **options)
        self.out = torch.empty_like(self.want)
        # the launch is given addresses: what they point to must live
        self.call = sampling.Sample(logits, **options, out=self.out)
        problem = sampling.problem_of(self.call, True)
        with traced_sources({"sample": "counters"}, TRACE_AT):
            self._launch = _sample_kernels().prepare(problem, config, budget)
        workspace = torch.zeros(workspace_bytes(problem), dtype=torch.uint8, device="cuda")
        self.notes = Notes(workspace[TRACE_AT:].view(torch.int32)[:TRACE_WORDS])
        numbers = sampling.numbers_of(self.call)
        self._given = (*SAMPLE.addresses(self.call), workspace.data_ptr(), *numbers)
        self.reset()

    def reset(self) -> None:
        self.out.fill_(-7)
        torch.cuda.synchronize()

    def check(self) -> None:
        torch.cuda.synchronize()
        assert torch.equal(self.out, self.want)


_ROWS_CONFIGS = {
    "norm": (RowsConfig(4, 1, 4), RowsConfig(8, 1, 4, 2), RowsConfig(16, 1, 1, pdl=False)),
    "other": (RowsConfig(4, 4, 8), RowsConfig(16, 1, 2, pdl=False)),
}
_EXPERTS = ("topk_softmax", "moe_permute", "moe_permute-counted", "moe_unpermute", "grouped_gemm",
            "grouped_gemm-swiglu")  # fmt: skip
RUNS: dict[str, Callable[[Budget], Any]] = {
    **{f"append-{x}": partial(TracedAppend, x) for x in (AppendConfig(4, 4), AppendConfig(16, 1))},
    **{
        f"{op}-{x}": partial(TracedRows, op, x)
        for op in rows_support.OPERATORS
        for x in _ROWS_CONFIGS["norm" if "norm" in op else "other"]
    },
    **{name: partial(TracedExperts, name) for name in _EXPERTS},
    **{
        f"sample-{x}": partial(TracedSample, x)
        for x in (SampleConfig(4, 8), SampleConfig(16, 2), SampleConfig(32, 1))
    },
}
"""A launch of a budget by name."""


def append() -> Callable[[], Any]:
    """A call through the public operator, as those below."""
    args, options = make(APPEND_CASE, "cuda")
    out = torch.empty_like(args[0])
    return lambda: smkern.qk_norm_rope_append(*args, **options, out=out)


def rows(op: str) -> Callable[[], Any]:
    call = rows_support.make(op, ROWS, WIDTH)
    given = [x for x in call[:-2] if isinstance(x, torch.Tensor)]
    return lambda: getattr(smkern, op)(*given, out=call.out)


def experts() -> Callable[[], Any]:
    x = torch.randn(TOKENS, HIDDEN, device="cuda").to(BF16)
    w = torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN, device="cuda").to(BF16)

    def layer() -> None:
        weights, experts = smkern.topk_softmax(x[:, :EXPERTS], TOP_K)
        rows, offsets, index = smkern.moe_permute(x, experts, EXPERTS)
        y = smkern.grouped_gemm(rows, w, offsets, swiglu=True)
        smkern.moe_unpermute(y, index, weights, residual=x)

    return layer


def sample() -> Callable[[], Any]:
    logits, options = logits_of(24, 151_936, BF16).cuda(), options_of("mixed", 24, "cuda")
    return lambda: smkern.sample(logits, **options)


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "append": append,
    **{op: partial(rows, op) for op in rows_support.OPERATORS},
    "experts": experts,
    "sample": sample,
}
