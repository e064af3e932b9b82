"""`smkern bench fp8`'s experts: grouped GEMMs of e4m3 with scales, beside bf16 and torch's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

import smkern
from smkern.bench.ops.cases import expert_counts
from smkern.measure.timing import Call, sets_for
from smkern.ops.reference.fp8 import dequantize, quantize
from smkern.ops.reference.moe import grouped_gemm

Kind = Literal["row", "block"]
KINDS: dict[Kind, tuple[str, str]] = {"block": ("block", "weight_block"), "row": ("token", "token")}
EXPERTS, TOP_K = 128, 8
SHAPES = {"gate-up": (768, 2048, True), "down": (2048, 768, False)}
"""(n, k, swiglu) of Qwen3-30B-A3B's experts."""
TOKENS = (64, 512, 4096)
ROUTINGS = ("even", "skewed")


@dataclass(frozen=True, slots=True)
class GroupedCase:
    """Each expert's rows times its weights, by the name of these; results in bf16."""

    kind: Kind
    shape: str
    tokens: int
    routing: str
    n: int
    k: int
    swiglu: bool
    experts: int = EXPERTS

    op = "grouped_gemm"

    @property
    def rows(self) -> int:
        return self.tokens * TOP_K

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each expert."""
        return expert_counts(self.rows, self.experts, self.routing)

    @property
    def columns(self) -> int:
        """Rows of an expert's weights."""
        return self.n * (1 + self.swiglu)

    @property
    def name(self) -> str:
        return f"{self.kind}-experts-{self.shape}-{self.tokens}-{self.routing}"

    @property
    def about(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in ("rows", "n", "k", "experts", "swiglu")}
        more = {"tokens": self.tokens, "routing": self.routing}
        return {"name": self.name, **sizes, **more, "dtype": "e4m3", "scales": self.kind}

    @property
    def bytes_moved(self) -> int:
        met = sum(count > 0 for count in self.counts)
        return met * self.columns * self.k + self.rows * (self.k + 2 * self.n)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.k


CASES = tuple(
    GroupedCase(kind, shape, tokens, routing, *SHAPES[shape])
    for kind in KINDS
    for shape in SHAPES
    for tokens in TOKENS
    for routing in ROUTINGS
)


@dataclass(slots=True)
class Operands:
    """Inputs in bf16 and e4m3; weights in as many sets as L2 does not hold."""

    x: Tensor = field(init=False)
    w: list[Tensor] = field(init=False)
    a: tuple[Tensor, Tensor] = field(init=False)
    q: list[tuple[Tensor, Tensor]] = field(init=False)
    out: Tensor = field(init=False)
    wanted: Tensor = field(init=False)
    """Of the quantized operands, fp64."""
    exact: Tensor = field(init=False)
    """Of those that bf16 multiplies, fp64."""

    def run(self, a: Tensor, w: Tensor, **scales: Any) -> None:
        """The public operator on the current stream's budget."""
        raise NotImplementedError


@dataclass(slots=True)
class GroupedOperands(Operands):
    """Those of experts."""

    case: GroupedCase
    device: str = "cuda"
    offsets: Tensor = field(init=False)

    def __post_init__(self) -> None:
        case, (a_kind, w_kind) = self.case, KINDS[self.case.kind]

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=self.device).bfloat16()

        self.offsets = torch.tensor([0, *case.counts], device=self.device).cumsum(0).int()
        self.x = random(case.rows, case.k)
        weights = case.experts * case.columns * case.k
        sets = range(sets_for(weights, least=1))
        self.w = [random(case.experts, case.columns, case.k) / case.k**0.5 for _ in sets]
        self.a = quantize(self.x, a_kind)
        self.q = [_quantized(w, w_kind) for w in self.w]
        self.out = torch.empty(case.rows, case.n, dtype=torch.bfloat16, device=self.device)
        self.wanted = self._product(_exactly(*self.a), _exactly(*self.q[0]))
        self.exact = self._product(self.x.double(), self.w[0].double())

    def run(self, a: Tensor, w: Tensor, **scales: Any) -> None:
        smkern.grouped_gemm(a, w, self.offsets, swiglu=self.case.swiglu, out=self.out, **scales)

    def _product(self, a: Tensor, w: Tensor) -> Tensor:
        wide = torch.float64
        return grouped_gemm(a, w, self.offsets, swiglu=self.case.swiglu, compute_dtype=wide)


def _exactly(q: Tensor, scale: Tensor) -> Tensor:
    return dequantize(q, scale, torch.float64)


def _quantized(w: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Experts' weights, one expert after the other: all at once would need 5 times the memory."""
    made = [quantize(expert, kind) for expert in w]
    values = torch.stack([q.view(torch.uint8) for q, _ in made]).view(made[0][0].dtype)
    return values, torch.stack([scale for _, scale in made])


def torch_call(ops: GroupedOperands) -> Call:
    """`torch._scaled_grouped_mm`, which takes scales of rows; its activation is another pass."""
    (a, a_scale), q, out, swiglu = ops.a, ops.q, ops.out, ops.case.swiglu

    def call(i: int) -> None:
        w, w_scale = q[i % len(q)]
        found = torch._scaled_grouped_mm(
            a, w.transpose(1, 2), a_scale, w_scale, offs=ops.offsets[1:], out_dtype=torch.bfloat16
        )
        if swiglu:
            gate, up = found.chunk(2, -1)
            found = functional.silu(gate) * up
        out.copy_(found)

    return call
