"""Operators over rows on the host: references, what is refused, what a kernel would be given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import smkern
from smkern.errors import ArgumentError, BudgetError
from smkern.kernels.rows_launch import PARAMETERS
from smkern.ops.operator import Operator
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.operator_library import schema_of
from smkern.ops.operator_warmup import work_of
from smkern.ops.rows.call import AddRmsNorm, Embedding, RmsNorm, SiluAndMul, numbers_of, problem_of
from smkern.ops.rows.operators import ADD_RMS_NORM, EMBEDDING, RMS_NORM, SILU_AND_MUL
from smkern.ops.rows.warmup import RowsCalls
from smkern.ops.warming import Target
from smkern.tuning.rows import RowsProblem
from tests.ops.operator_cases import FakeKernels, FakeOperator
from tests.ops.tensors import rows

BF16, FP16 = torch.bfloat16, torch.float16
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])


@DTYPES
def test_norms_round_as_hugging_faces_do(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    layer = llama.LlamaRMSNorm(64, eps=1e-5).to(dtype)
    with torch.no_grad():
        layer.weight.normal_()
        x, residual = rows(dtype=dtype), rows(dtype=dtype)
        found = smkern.rms_norm(x, layer.weight, eps=1e-5)
        assert torch.equal(found, layer(x))
        total = residual + x
        out = smkern.add_rms_norm(x, residual, layer.weight, eps=1e-5, out=x)
        assert out is x
        assert torch.equal(residual, total)
        assert torch.equal(x, layer(total))


@DTYPES
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = rows(dtype=dtype)
    gate, up = x[:, :32], x[:, 32:]
    assert torch.equal(smkern.silu_and_mul(x), torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_embedding(dtype: torch.dtype) -> None:
    table = rows(9)
    ids = torch.tensor([8, -1, 0, 9, 3], dtype=dtype)
    found = smkern.embedding(ids, table)
    assert torch.equal(found[[0, 2, 4]], table[[8, 0, 3]])
    assert not found[[1, 3]].any()
    assert not smkern.embedding(ids, table[:0]).any()


def test_no_tokens_and_strided_results() -> None:
    weight = torch.ones(64).to(BF16)
    assert smkern.rms_norm(rows(0), weight).shape == (0, 64)
    out = torch.full((5, 96), torch.nan).to(BF16)
    x = rows()
    assert smkern.rms_norm(x, weight, out=out[:, :64]).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :64], smkern.rms_norm(x, weight))
    assert out[:, 64:].isnan().all()


ONES = torch.ones(64).to(BF16)
BAD: dict[str, tuple[Any, str]] = {
    "no tensor": (lambda: smkern.rms_norm(None, ONES), "x is NoneType"),
    "dims": (lambda: smkern.rms_norm(rows()[None], ONES), r"\[tokens, hidden\]"),
    "dtype": (lambda: smkern.rms_norm(rows().double(), ONES), r"x is torch\.float64: use"),
    "inner": (lambda: smkern.rms_norm(rows(64).T, ONES[:64]), "inner stride"),
    "width": (lambda: smkern.rms_norm(rows(1, 16392), torch.ones(16392)), "at most 16384"),
    "weight size": (lambda: smkern.rms_norm(rows(), ONES[:32]), r"wanted \[64\]"),
    "weight device": (lambda: smkern.rms_norm(rows(), ONES.to("meta")), "weight is on meta, x on"),
    "weight dtype": (lambda: smkern.rms_norm(rows(), ONES.half()), "weight is torch.float16"),
    "eps": (lambda: smkern.rms_norm(rows(), ONES, eps=-1.0), "eps=-1.0"),
    "eps text": (lambda: smkern.rms_norm(rows(), ONES, eps="x"), "no number"),
    "eps beyond fp32": (lambda: smkern.rms_norm(rows(), ONES, eps=1e39), "largest of fp32"),
    "eps beyond floats": (lambda: smkern.rms_norm(rows(), ONES, eps=10**400), "eps=inf"),
    "residual": (lambda: smkern.add_rms_norm(rows(), rows(4), ONES), "residual has shape"),
    "residual dtype": (
        lambda: smkern.add_rms_norm(rows(), rows().half(), ONES),
        "residual is torch.float16",
    ),
    "residual rows": (
        lambda: smkern.add_rms_norm(rows(), rows(1).expand(5, 64), ONES),
        "share an address",
    ),
    "odd": (lambda: smkern.silu_and_mul(rows(5, 63)), "63 columns"),
    "ids": (lambda: smkern.embedding(torch.zeros(3), rows()), r"ids is torch\.float32"),
    "ids dims": (lambda: smkern.embedding(torch.zeros(3, 1).int(), rows()), r"\[tokens\]"),
    "table": (lambda: smkern.embedding(torch.zeros(3).int(), ONES), r"table has shape"),
    "out": (lambda: smkern.silu_and_mul(rows(), out=rows()), r"the result is \[5, 32\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        call()


def test_overlaps() -> None:
    whole = rows(6)
    with pytest.raises(ArgumentError, match=r"residual at .* overlaps x"):
        smkern.add_rms_norm(whole[:3], whole[1:4], ONES)
    with pytest.raises(ArgumentError, match=r"out at .* overlaps residual"):
        smkern.add_rms_norm(rows(3), whole[:3], ONES, out=whole[:3])
    with pytest.raises(ArgumentError, match=r"out at .* overlaps x"):
        smkern.silu_and_mul(whole, out=whole[:, :32])
    with pytest.raises(ArgumentError, match=r"x may only be out itself"):
        smkern.rms_norm(whole[:3], ONES, out=whole[1:4])
    with pytest.raises(BudgetError, match="num_sms=0"):
        smkern.silu_and_mul(whole, num_sms=0)


def test_what_a_launch_is_given() -> None:
    x, out = torch.zeros(5, 80).to(BF16)[:, :64], torch.zeros(5, 72).to(BF16)[:, :64]
    call = RmsNorm(x, ONES, 1e-5, out)
    assert problem_of(call, True) == RowsProblem("rms_norm", 5, 64)
    assert numbers_of(call) == (10, 9, 5, 1e-5)
    both = AddRmsNorm(x, out, ONES.float(), 1e-5, rows())
    assert problem_of(both, True) == RowsProblem("add_rms_norm", 5, 64, "bf16", "fp32")
    assert numbers_of(both) == (10, 9, 8, 5, 1e-5)
    odd = torch.zeros(5, 67).to(FP16)[:, :64]
    call = SiluAndMul(odd, rows(5, 32, FP16))
    wanted = RowsProblem("silu_and_mul", 5, 32, "fp16", "fp16", aligned=False)
    assert problem_of(call, True) == wanted
    assert numbers_of(call) == (67, 32, 5)
    ids = torch.zeros(6, 2, dtype=torch.int64)[:, 0]
    gather = Embedding(ids, rows(9), rows(6))
    assert problem_of(gather, True) == RowsProblem("embedding", 6, 64, index_dtype="i64")
    assert numbers_of(gather) == (2, 8, 8, 6, 9)
    assert problem_of(RmsNorm(rows(0), ONES), True) is None
    with pytest.raises(ArgumentError, match=r"float32 on a GPU"):
        problem_of(RmsNorm(rows(dtype=torch.float32), ONES.float()), True)


@pytest.mark.parametrize("offset", [0, 1])
def test_steps_are_counted_as_the_kernels_do(offset: int) -> None:
    """Whatever is not whole, the problem and the numbers agree on it."""
    memory = torch.zeros(4096).to(BF16)
    x = memory[offset:].as_strided((4, 64), (72, 1))
    call = RmsNorm(x, ONES, 1e-6, rows(4))
    problem = problem_of(call, x.data_ptr() % 16 == 0)
    assert problem is not None
    assert numbers_of(call)[:2] == ((9, 8) if problem.aligned else (72, 64))
    # a width that is no whole vectors is so for one row, too
    one = RmsNorm(rows(1, 60), ONES[:60], 1e-6, rows(1, 60))
    found = problem_of(one, True)
    assert found is not None
    assert not found.aligned


class RowsKernels(FakeKernels):
    """Launches nothing."""

    def variants(self, problem: RowsProblem) -> Any:
        return ((problem.op, problem.width, problem.dtype, problem.aligned),)

    def launch(self, *given: Any) -> None:
        self.launches.append(given)


def eager(op: Operator[Any], kernels: FakeKernels) -> EagerOperator[Any]:
    return FakeOperator(op, kernels=kernels).eager


@pytest.mark.parametrize(
    ("op", "call"),
    [
        (RMS_NORM, RmsNorm(rows(), ONES)),
        (ADD_RMS_NORM, AddRmsNorm(rows(), rows(), ONES)),
        (SILU_AND_MUL, SiluAndMul(rows())),
        (EMBEDDING, Embedding(torch.zeros(5).int(), rows())),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_launch_has_the_kernels_parameters(op: Operator[Any], call: Any) -> None:
    kernels = RowsKernels()
    out = eager(op, kernels)(call)
    ((problem, stream, *values),) = kernels.launches
    assert problem.op == op.name
    assert stream == 7
    names = list(PARAMETERS[op.name])
    assert len(values) == len(names)
    assert values[names.index("out_ptr")] == out.data_ptr()
    assert values[names.index("out_step")] == out.stride(0) // 8
    assert values[names.index("rows")] == 5


@pytest.mark.slow
def test_opcheck() -> None:
    x = rows(4, 64, torch.float32)
    weight = ONES.float()
    operators = torch.ops.smkern
    torch.library.opcheck(operators.rms_norm.default, (x, weight))
    torch.library.opcheck(operators.rms_norm_out.default, (x, weight, torch.zeros(4, 64)))
    torch.library.opcheck(operators.add_rms_norm.default, (x, x.clone(), weight), {"eps": 1e-5})
    torch.library.opcheck(operators.silu_and_mul.default, (x,))
    torch.library.opcheck(operators.embedding.default, (torch.tensor([1, 9]), x))
    assert schema_of(ADD_RMS_NORM, returns=False) == (
        "add_rms_norm_out(Tensor x, Tensor(a!) residual, Tensor weight, Tensor(r0!) out, *, "
        "float eps=1e-06, SymInt? num_sms=None) -> ()"
    )


@pytest.mark.slow
def test_compiled() -> None:
    x, residual, weight = rows(4), rows(4), ONES
    wanted, total = smkern.rms_norm(residual + x, weight), residual + x

    def step(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return smkern.add_rms_norm(x, residual, weight, out=x)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(x, residual)
    assert torch.equal(found, wanted)
    assert torch.equal(residual, total)


def test_the_work_of_a_warmup() -> None:
    calls = RowsCalls(hidden=[64], added=[64, 128], gated=[96], embedded=[64])
    made = calls.calls(torch.device("cpu"), True)
    assert [op.name for op, _ in made] == [
        "rms_norm", "add_rms_norm", "add_rms_norm", "silu_and_mul", "embedding",
    ]  # fmt: skip
    kernels = RowsKernels()
    target = Target(-1, 132, [], (True,))
    for op, call in made:
        work = work_of(op, [call], target, eager(op, kernels))
        assert len(work.compile) == len(work.launches) == 1
        work.launches[0]()
    assert len(kernels.launches) == 5
    for bad in ({}, {"hidden": [0]}, {"hidden": [99999]}, {"gated": [64], "dtype": torch.float32}):
        with pytest.raises(ArgumentError):
            RowsCalls(**bad)
