"""What the tests of operators over rows share on a GPU: calls, the truth, comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import smkern
from smkern.kernels.rows_launch import RowsVariant, variant_of
from smkern.ops.rows.call import AddRmsNorm, Embedding, RmsNorm, SiluAndMul, op_of, result_of
from smkern.ops.rows.operators import ADD_RMS_NORM, EMBEDDING, RMS_NORM, SILU_AND_MUL
from smkern.tuning.rows import RowsProblem, shapes_of
from tests.gpu.bits import same_bits, twin
from tests.gpu.compiling import compile_ahead
from tests.gpu.gemm_support import capability

OPERATORS = {op.name: op for op in (RMS_NORM, ADD_RMS_NORM, SILU_AND_MUL, EMBEDDING)}
EPS = 1e-5
PAD = 8
"""Elements between rows that nothing may write."""


def precompile(kinds: Iterable[tuple[str, int, torch.dtype, bool]]) -> None:
    """Compile side by side what calls of these (op, width, dtype, aligned) launch."""
    names: dict[torch.dtype, Any] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    wanted: list[RowsVariant] = []
    for op, width, dtype, aligned in kinds:
        name, whole = names[dtype], aligned and width % 8 == 0
        problem = RowsProblem(op, 1, width, name, name, "i32", whole)  # type: ignore[arg-type]
        wanted += [variant_of(problem, config, capability()) for config in shapes_of(problem)]
    compile_ahead(wanted)


def rows_of(rows: int, cols: int, dtype: torch.dtype, pad: int = PAD) -> Tensor:
    """Random rows, some of them large, `pad` elements apart."""
    x = torch.randn(rows, cols + pad, device="cuda")
    x *= torch.logspace(-2, 1, max(rows, 1), device="cuda")[:rows, None]
    return x.to(dtype)[:, :cols]


def poisoned(rows: int, cols: int, dtype: torch.dtype, pad: int = PAD) -> Tensor:
    return torch.full((rows, cols + pad), torch.nan, device="cuda", dtype=dtype)[:, :cols]


def make(
    op: str, rows: int, width: int, dtype: torch.dtype = torch.bfloat16, pad: int = PAD
) -> Any:
    """A call on random rows, with a result of NaN."""
    out = poisoned(rows, width, dtype, pad)
    if op == "silu_and_mul":
        return SiluAndMul(rows_of(rows, 2 * width, dtype, pad), out)
    if op == "embedding":
        table = rows_of(100, width, dtype, pad)
        ids = torch.randint(-3, 103, (rows,), dtype=torch.int32, device="cuda")
        return Embedding(ids, table, out)
    x, weight = rows_of(rows, width, dtype, pad), torch.randn(width, device="cuda").to(dtype)
    if op == "rms_norm":
        return RmsNorm(x, weight, EPS, out)
    return AddRmsNorm(x, rows_of(rows, width, dtype, pad), weight, EPS, out)


def cloned(call: Any) -> Any:
    """The same call over memory of its own, strides kept."""
    return type(call)(*map(twin, call))


def truth(call: Any) -> tuple[Tensor, Tensor | None]:
    """The result in fp64 and the residual's bits, of a call that has not run."""
    if isinstance(call, Embedding):
        inside = (call.ids >= 0) & (call.ids < call.table.shape[0])
        found = call.table.double()[torch.where(inside, call.ids, 0).long()]
        return found * inside[:, None], None
    if isinstance(call, SiluAndMul):
        gate, up = call.x.double().chunk(2, -1)
        return gate * torch.sigmoid(gate) * up, None
    x, total = call.x, None
    if isinstance(call, AddRmsNorm):
        x = total = (call.x.float() + call.residual.float()).to(call.x.dtype)
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + call.eps)
    return wide * scale * call.weight.double(), total


def gaps_of(x: Tensor) -> Tensor | None:
    """What lies between the rows of a matrix that was made with gaps."""
    base = x._base
    return None if base is None or base.dim() != 2 else base[:, x.shape[1] :]


def check(before: Any, call: Any) -> None:
    """Hold a call that ran against the truth; what it may not write is as it was."""
    wanted, total = truth(before)
    ((rows, width), dtype) = result_of(before)[0]
    out = call.out
    assert out.shape == (rows, width)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), wanted, rtol=eps, atol=1e-6)
    if total is not None:
        assert same_bits(call.residual, total), "the residual is not the rounded sum"
    gaps = gaps_of(out)
    if gaps is not None and out is not call[0]:
        assert gaps.isnan().all(), "the kernel wrote between rows"
    for name in call._fields:
        x, y = getattr(before, name), getattr(call, name)
        if isinstance(x, Tensor) and name not in ("out", "residual") and y is not out:
            assert torch.equal(x, y), f"{name} was changed"


def tensors(call: Any) -> list[Tensor]:
    """What a call reads, in order."""
    return [x for x in call[:-2] if isinstance(x, Tensor)]


def eps_of(call: Any) -> dict[str, float]:
    return {"eps": call.eps} if hasattr(call, "eps") else {}


def run(call: Any, **options: Any) -> Any:
    """A call through the public operator, checked."""
    before = cloned(call)
    operator = getattr(smkern, op_of(call))
    assert operator(*tensors(call), out=call.out, **eps_of(call), **options) is call.out
    torch.cuda.synchronize()
    check(before, call)
    return call
