"""`smkern bench fp8`: GEMMs of e4m3 with scales over SM budgets, beside bf16 and torch's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

import smkern
from smkern.bench import deepgemm, fp8_grouped
from smkern.bench.cases import Sizes, case_options
from smkern.bench.fp8_grouped import GroupedCase, GroupedOperands, Operands
from smkern.bench.fp8_rows import summarize
from smkern.bench.frame import Bench, GroupSuite, Provider, wrong_result
from smkern.bench.peers import DEEPGEMM, FLASHINFER, installed
from smkern.bench.rows import loses_to_best
from smkern.bench.suite import Output, conclude, known_names, suite_command
from smkern.measure.partitions import Place
from smkern.measure.timing import Call, sets_for
from smkern.ops.reference.fp8 import dequantize, quantize

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
PEERS = ("bf16", "torch", DEEPGEMM, FLASHINFER)
TOLERANCE = {"smkern": 0.004, "torch": 0.01, "bf16": 0.004, DEEPGEMM: 0.01, FLASHINFER: 0.01}
"""|x - wanted| / |wanted| in fp64, of the operands as they are multiplied; peers round gate
and up."""


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
class GemmOperands(Operands):
    """Those of one product."""

    case: Fp8Case
    device: str = "cuda"

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

    def run(self, a: Tensor, w: Tensor, **scales: Any) -> None:
        smkern.gemm(a, w, out=self.out, static_weights=True, **scales)


def our_call(ops: Operands) -> Call:
    """smkern on e4m3."""
    (a, a_scale), q = ops.a, ops.q

    def call(i: int) -> None:
        w, w_scale = q[i % len(q)]
        ops.run(a, w, a_scale=a_scale, w_scale=w_scale)

    return call


def bf16_call(ops: Operands) -> Call:
    """What the e4m3 kernels are to beat: the same products in bf16."""
    return lambda i: ops.run(ops.x, ops.w[i % len(ops.w)])


def torch_call(ops: GemmOperands) -> Call:
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


def flashinfer_call(ops: GemmOperands) -> Call:
    """FlashInfer's for Hopper, by blocks: TensorRT-LLM's DeepGEMM, made for the whole device."""
    gemm = import_module("flashinfer.gemm").fp8_blockscale_gemm_sm90
    (a, a_scale), q, out = ops.a, ops.q, ops.out
    by_columns = a_scale.t().contiguous()

    def call(i: int) -> None:
        w, w_scale = q[i % len(q)]
        gemm(a, w, by_columns, w_scale, out=out)

    return call


SMKERN: dict[str, Callable[..., Call]] = {"smkern": our_call, "bf16": bf16_call}
CALLS: dict[str, dict[str, Callable[..., Call]]] = {
    "gemm": SMKERN
    | {"torch": torch_call, DEEPGEMM: deepgemm.gemm_call, FLASHINFER: flashinfer_call},
    "grouped_gemm": SMKERN | {"torch": fp8_grouped.torch_call, DEEPGEMM: deepgemm.grouped_call},
}
"""Who computes an operator's cases, on their operands."""


@dataclass(slots=True)
class Fp8Bench(Bench[AnyCase]):
    """smkern in e4m3, in bf16, and torch on one case."""

    ops: GemmOperands | GroupedOperands
    names: Collection[str] = PEERS
    budget_us: float = 60_000.0
    errors: dict[str, float] = field(default_factory=dict)
    """Of who was checked, by name."""

    def ours(self, case: AnyCase, place: Place) -> list[Provider]:
        return [self._provider("smkern", case, place)]

    def peers(self, case: AnyCase, place: Place) -> Iterator[Provider]:
        for name in self.names:
            if not serves(name, case):
                continue
            provider = self._provider(name, case, place)
            if name != DEEPGEMM:
                yield provider
                continue
            for size in deepgemm.sizes(place.num_sms):
                call = partial(CALLS[case.op][name], self.ops, size)
                yield replace(provider, make=call, about={"layout": f"num_sms={size}"})

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


def serves(peer: str, case: AnyCase) -> bool:
    """Whether a peer takes a case's scales: DeepGEMM and FlashInfer those of blocks, torch's
    experts of rows."""
    if peer == "torch":
        return case.op == "gemm" or case.kind == "row"
    if peer == FLASHINFER:
        return case.op == "gemm" and case.kind == "block"
    return peer != DEEPGEMM or case.kind == "block"


def operands_of(case: AnyCase) -> GemmOperands | GroupedOperands:
    """Inputs of a case."""
    return GroupedOperands(case) if isinstance(case, GroupedCase) else GemmOperands(case)


@suite_command(
    "fp8", *case_options("block,qkv-64", peers=PEERS), quick="One shape: seconds of GPU time."
)
def command(output: Output, *, cases: str | None, budgets: Any, peers: str, again: bool) -> None:
    """Time smkern.gemm of e4m3 in SM partitions and on the whole chip.

    Each group of cells is one product, or one of experts, in one budget: smkern in e4m3 with scales
    of matrices, of rows or of blocks; smkern in bf16 as dispatched; torch's; with scales of blocks
    DeepGEMM's and FlashInfer's, where sgl-deep-gemm and flashinfer-python are installed. Inputs are
    quantized before.
    """
    groups = SIZES.groups(quick=output.quick, cases=cases, budgets=budgets)
    results = output.open()
    names = installed(known_names(peers, PEERS, "peer"), results.meta)
    suite = GroupSuite(
        lambda cases: Fp8Bench(operands_of(cases[0]), names), summarize, loses_to_best
    )
    conclude(results, output.path, suite.run(groups, results, output, again=again))
