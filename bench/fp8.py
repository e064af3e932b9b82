"""`smkern bench fp8`: GEMMs of e4m3 with scales over SM budgets, beside bf16 and torch's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

from smkern.bench import fp8_grouped
from smkern.bench.cases import Sizes, case_options
from smkern.bench.fp8_grouped import GroupedCase, GroupedOperands
from smkern.bench.frame import Bench, GroupSuite, Provider, wrong_result
from smkern.bench.rows import loses_to_best, not_measured, settled, target_row
from smkern.bench.suite import Output, conclude, known_names, suite_command
from smkern.measure.partitions import Place
from smkern.measure.timing import Call, geomean, sets_for
from smkern.ops.reference.fp8 import dequantize, quantize

Cell = dict[str, Any]
Kind = Literal["tensor", "row", "block"]

KINDS: dict[Kind, tuple[str, str]] = {
    "tensor": ("tensor", "tensor"),
    "row": ("token", "token"),
    "block": ("block", "weight_block"),
}
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate-up": (24576, 4096), "down": (4096, 12288)}
"""(N, K) of Qwen3-8B's weights."""
ROWS = (16, 64, 1024, 4096)
BUDGETS = (24, 48, 84, 132)
PEERS = ("bf16", "torch")
FEW_ROWS, FEW_SMS = 64, 48
MANY_ROWS, MANY_SMS = 1024, 60
TIMES_FEW = 1.8
"""Times bf16's speed for up to `FEW_ROWS` rows on up to `FEW_SMS` SMs."""
TIMES_MANY: dict[Kind, float] = {"tensor": 1.75, "row": 1.75, "block": 1.6}
"""The same from `MANY_ROWS` rows and `MANY_SMS` SMs on."""
TIMES_EXPERTS = 1.5
"""The same of experts."""
OVER_BEST = 1.1
OVER_ERROR = 1.2
"""The most that an error may be of bf16's."""
TOLERANCE = {"smkern": 0.004, "torch": 0.01, "bf16": 0.004}
"""|x - wanted| / |wanted| in fp64, of the operands as they are multiplied; torch rounds gate and
up."""


@dataclass(frozen=True, slots=True)
class Fp8Case:
    """A product of e4m3 with bf16 results, by the name of its weights."""

    kind: Kind
    shape: str
    m: int
    n: int
    k: int

    op = "gemm"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.shape}-{self.m}"

    @property
    def about(self) -> dict[str, Any]:
        sizes = {"m": self.m, "n": self.n, "k": self.k}
        return {"name": self.name, **sizes, "dtype": "e4m3", "scales": self.kind}

    @property
    def bytes_moved(self) -> int:
        return (self.n + self.m) * self.k + 2 * self.m * self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


CASES = tuple(
    Fp8Case(kind, shape, m, *SHAPES[shape]) for kind in KINDS for shape in SHAPES for m in ROWS
)
AnyCase = Fp8Case | GroupedCase
EVERY: tuple[AnyCase, ...] = (*CASES, *fp8_grouped.CASES)
SIZES = Sizes(EVERY, tuple(c for c in CASES if c.shape == "qkv" and c.m >= 64), BUDGETS, (24, 132))


@dataclass(slots=True)
class Operands:
    """Inputs in bf16 and e4m3; weights in as many sets as L2 does not hold."""

    case: Fp8Case
    device: str = "cuda"
    x: Tensor = field(init=False)
    w: list[Tensor] = field(init=False)
    a: tuple[Tensor, Tensor] = field(init=False)
    q: list[tuple[Tensor, Tensor]] = field(init=False)
    out: Tensor = field(init=False)
    wanted: Tensor = field(init=False)
    """Of the quantized operands, fp64."""
    exact: Tensor = field(init=False)
    """Of those that bf16 multiplies, fp64."""

    def __post_init__(self) -> None:
        case, (a_kind, w_kind) = self.case, KINDS[self.case.kind]

        def random(rows: int) -> Tensor:
            return torch.randn(rows, case.k, device=self.device).bfloat16()

        self.x = random(case.m)
        self.w = [random(case.n) for _ in range(sets_for(case.n * case.k, most=12))]
        self.a = quantize(self.x, a_kind)
        self.q = [quantize(w, w_kind) for w in self.w]
        self.out = torch.empty(case.m, case.n, dtype=torch.bfloat16, device=self.device)
        exactly = torch.float64
        self.wanted = dequantize(*self.a, exactly) @ dequantize(*self.q[0], exactly).T
        self.exact = self.x.double() @ self.w[0].double().T


def our_call(ops: Operands) -> Call:
    """The public operator on the current stream's budget."""
    import smkern

    (a, a_scale), q, out = ops.a, ops.q, ops.out

    def call(i: int) -> None:
        w, w_scale = q[i % len(q)]
        smkern.gemm(a, w, a_scale=a_scale, w_scale=w_scale, out=out, static_weights=True)

    return call


def bf16_call(ops: Operands) -> Call:
    """What the e4m3 kernels are to beat: the same product in bf16."""
    import smkern

    x, w, out = ops.x, ops.w, ops.out
    return lambda i: smkern.gemm(x, w[i % len(w)], out=out, static_weights=True)


def torch_call(ops: Operands) -> Call:
    """`torch._scaled_mm`, which is cuBLAS or CUTLASS."""
    (a, a_scale), q, out = ops.a, ops.q, ops.out
    if ops.case.kind == "row":
        a_scale, q = a_scale[:, None], [(w, scale[:, None]) for w, scale in q]
    elif ops.case.kind == "block":
        a_scale = a_scale.t().contiguous().t()
    else:
        a_scale, q = a_scale.reshape(()), [(w, scale.reshape(())) for w, scale in q]

    def call(i: int) -> None:
        w, w_scale = q[i % len(q)]
        torch._scaled_mm(a, w.t(), a_scale, w_scale.t(), out_dtype=torch.bfloat16, out=out)

    return call


CALLS: dict[str, dict[str, Callable[[Any], Call]]] = {
    "gemm": {"smkern": our_call, "bf16": bf16_call, "torch": torch_call},
    "grouped_gemm": fp8_grouped.CALLS,
}
"""Who computes an operator's cases, on their operands."""


@dataclass(slots=True)
class Fp8Bench(Bench[AnyCase]):
    """smkern in e4m3, in bf16, and torch on one case."""

    ops: Operands | GroupedOperands
    names: Collection[str] = PEERS
    budget_us: float = 60_000.0
    errors: dict[str, float] = field(default_factory=dict)
    """Of who was checked, by name."""

    def ours(self, case: AnyCase, place: Place) -> list[Provider]:
        return [self._provider("smkern", case, place)]

    def peers(self, case: AnyCase, place: Place) -> list[Provider]:
        return [self._provider(name, case, place) for name in self.names]

    def _provider(self, name: str, case: AnyCase, place: Place) -> Provider:
        call = partial(CALLS[case.op][name], self.ops)
        return Provider(name, place, call, tell=lambda: {"relative_error": self.errors[name]})

    def reset(self, case: AnyCase) -> None:
        self.ops.out.fill_(torch.nan)

    def complaint(self, case: AnyCase, provider: Provider, result: Any) -> str | None:
        wanted = self.ops.exact if provider.name == "bf16" else self.ops.wanted
        off = float((self.ops.out.double() - wanted).norm() / wanted.norm())
        self.errors[provider.name] = float(f"{off:.4g}")
        return wrong_result(off, TOLERANCE[provider.name])


def operands_of(case: AnyCase) -> Operands | GroupedOperands:
    """Inputs of a case."""
    return GroupedOperands(case) if isinstance(case, GroupedCase) else Operands(case)


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """How many times bf16's speed, by scales; prompts and the worst cell beside the best of all."""
    cells = list(cells)
    every = [c for c in cells if c["provider"] == "smkern"]
    if not every:
        return {}
    ours = [c for c in every if "experts" not in c["case"]]
    found: dict[str, Any] = _of_experts(cells, every)
    for kind in KINDS:
        mine = [c for c in ours if c["case"]["scales"] == kind]
        for name, part, target in (
            ("few_rows", [c for c in mine if _is_few(c)], TIMES_FEW),
            ("many_rows", [c for c in mine if _is_many(c)], TIMES_MANY[kind]),
        ):
            times = list(times_of(cells, part, "bf16"))
            found[f"fp8_{kind}_{name}_times_bf16"] = target_row(geomean(times), target, len(times))
        times = list(times_of(cells, mine, "bf16"))
        worst = min(times, default=None)
        found[f"fp8_{kind}_worst_times_bf16"] = target_row(worst, None, len(times))
        found[f"fp8_{kind}_error_over_bf16"] = _of_errors(cells, mine)
    many = [settled(c) for c in ours if c.get("vs_best") and _is_many(c)]
    found["fp8_many_rows_vs_best"] = target_row(geomean(many), OVER_BEST, len(many))
    leads = [settled(c) for c in ours if c.get("vs_best")]
    found["fp8_worst_vs_best"] = target_row(min(leads, default=None), 1.0, len(leads))
    return found | {"fp8_not_measured": not_measured(every, _name)}


def _of_experts(cells: Iterable[Cell], ours: Iterable[Cell]) -> dict[str, Any]:
    """Times bf16's speed of grouped products, by scales and tokens."""
    found = {}
    for kind, tokens in product(fp8_grouped.KINDS, fp8_grouped.TOKENS):
        about = {"scales": kind, "tokens": tokens}
        mine = [c for c in ours if about.items() <= c["case"].items()]
        times = list(times_of(cells, mine, "bf16"))
        name = f"fp8_{kind}_experts_{tokens}_tokens"
        found[f"{name}_times_bf16"] = target_row(geomean(times), TIMES_EXPERTS, len(times))
    experts = [c for c in ours if "experts" in c["case"]]
    return found | {"fp8_experts_error_over_bf16": _of_errors(cells, experts)}


def _of_errors(cells: Iterable[Cell], ours: Iterable[Cell]) -> dict[str, Any]:
    """Our largest error over bf16's of the same product."""
    plain = {
        _key(c): c["relative_error"]
        for c in cells
        if c["provider"] == "bf16" and c.get("relative_error")
    }
    found = [
        c["relative_error"] / plain[_key(c)]
        for c in ours
        if c.get("relative_error") and _key(c) in plain
    ]
    return target_row(max(found, default=None), OVER_ERROR, len(found), at_most=True)


def times_of(cells: Iterable[Cell], ours: Iterable[Cell], peer: str) -> Iterator[float]:
    """A peer's time over each of our cells', where both were measured; the peer's best counts."""
    best: dict[Any, float] = {}
    for cell in cells:
        if cell["provider"] == peer and cell.get("us"):
            best[_key(cell)] = min(cell["us"], best.get(_key(cell), cell["us"]))
    for cell in ours:
        if cell.get("us") and _key(cell) in best:
            yield best[_key(cell)] / cell["us"]


def _is_few(cell: Cell) -> bool:
    return cell["case"]["m"] <= FEW_ROWS and cell["num_sms"] <= FEW_SMS


def _is_many(cell: Cell) -> bool:
    return cell["case"]["m"] >= MANY_ROWS and cell["num_sms"] >= MANY_SMS


def _key(cell: Cell) -> tuple[str, int]:
    return cell["case"]["name"], cell["num_sms"]


def _name(cell: Cell) -> dict[str, Any]:
    return {"name": cell["case"]["name"], "num_sms": cell["num_sms"]}


@suite_command(
    "fp8", *case_options("block,qkv-64", peers=PEERS), quick="One shape: seconds of GPU time."
)
def command(output: Output, *, cases: str | None, budgets: Any, peers: str, again: bool) -> None:
    """Time smkern.gemm of e4m3 in SM partitions and on the whole chip.

    Each group of cells is one product, or one of experts, in one budget: smkern in e4m3 with scales
    of matrices, of rows or of blocks; smkern in bf16 as dispatched; torch's. Inputs are quantized
    before.
    """
    groups = SIZES.groups(quick=output.quick, cases=cases, budgets=budgets)
    names = known_names(peers, PEERS, "peer")
    results = output.open()
    suite = GroupSuite(
        lambda cases: Fp8Bench(operands_of(cases[0]), names), summarize, loses_to_best
    )
    conclude(results, output.path, suite.run(groups, results, output, again=again))
