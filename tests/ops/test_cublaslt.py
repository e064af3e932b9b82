"""The cuBLASLt binding without the library: what it refuses, and a library that records calls."""

from __future__ import annotations

import ctypes

import pytest
import torch

from smkern.errors import ArgumentError, DeviceError
from smkern.kernels import cublaslt
from smkern.tuning.config import Budget, Epilogue, GemmProblem
from smkern.tuning.constraints import COUNTER_BYTES

BUDGET = Budget(60, "mask", True)


class FakeLibrary:
    """Takes any cublasLt call, notes its name and arguments, and answers success."""

    def __init__(self, algorithms: int = 1) -> None:
        self.calls: list[tuple[str, tuple]] = []
        self.algorithms = algorithms

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, args))
            if name.endswith("Create"):
                args[0]._obj.value = len(self.calls)
            if name == "cublasLtMatmulAlgoGetHeuristic":
                args[-1]._obj.value = self.algorithms
            return 0

        return call

    def named(self, name):
        return [args for called, args in self.calls if called == f"cublasLt{name}"]


def plan(problem, lib, scales=None):
    return cublaslt.CublasLtPlan(lib, ctypes.c_void_p(1), problem, BUDGET, scales)


def launch(made, bias=0, stride=4096, workspace=1 << 20):
    made.launch(16, 32, 48, bias, 0, stride, stride, 6144, 0, workspace, 7)


def test_result_structure_has_the_librarys_size():
    assert ctypes.sizeof(cublaslt._Heuristic) == 96
    assert cublaslt._Heuristic.workspace_bytes.offset == 64


def test_the_budget_is_told_and_the_counters_stay_out_of_the_workspace():
    lib = FakeLibrary()
    made = plan(GemmProblem(64, 6144, 4096), lib)
    launch(made)
    told = {args[1].value: args[2]._obj.value for args in lib.named("MatmulDescSetAttribute")}
    assert told == {3: 1, 15: 60}
    call = lib.named("Matmul")[0]
    assert call[3] == 32, "w is the left operand"
    assert call[5] == 16
    assert call[-3:] == ((1 << 20) + COUNTER_BYTES, cublaslt.WORKSPACE_BYTES, 7)
    assert made.workspace_bytes == COUNTER_BYTES + cublaslt.WORKSPACE_BYTES


def test_layouts_are_column_major_views():
    lib = FakeLibrary()
    launch(plan(GemmProblem(64, 6144, 4096), lib))
    shapes = [args[2:] for args in lib.named("MatrixLayoutCreate")]
    assert shapes == [
        (4096, 6144, 4096), (4096, 64, 4096), (6144, 64, 6144), (6144, 64, 6144)
    ]  # fmt: skip
    call = lib.named("Matmul")[0]
    assert ctypes.c_float.from_address(call[7]).value == 0.0
    assert call[8] == call[10] == 48, "what is not added is the output"


def test_a_residual_is_added_by_its_own_rows():
    lib = FakeLibrary()
    made = plan(GemmProblem(64, 6144, 4096, epilogue=Epilogue(residual=True)), lib)
    for stride in (8192, 8192, 6144):
        made.launch(16, 32, 48, 0, 96, 4096, 4096, 6144, stride, 1 << 20, 7)
    added = [args[2:] for args in lib.named("MatrixLayoutCreate")][3::4]
    assert added == [(6144, 64, 8192), (6144, 64, 6144)], "strides have layouts of their own"
    call = lib.named("Matmul")[0]
    assert ctypes.c_float.from_address(call[7]).value == 1.0
    assert (call[8], call[10]) == (96, 48)


def test_a_second_launch_only_multiplies():
    lib = FakeLibrary()
    made = plan(GemmProblem(64, 6144, 4096, epilogue=Epilogue(bias=True)), lib)
    launch(made, bias=64)
    before = len(lib.calls)
    launch(made, bias=64)
    assert [name for name, _ in lib.calls[before:]] == ["cublasLtMatmul"]
    launch(made, bias=128)
    assert len(lib.named("MatmulAlgoGetHeuristic")) == 1
    told = [args[1].value for args in lib.named("MatmulDescSetAttribute")]
    assert told.count(8) == 2, "a bias address has a descriptor of its own"


@pytest.mark.parametrize(("scales", "mode"), [("matrix", 0), ("row", 3)])
def test_scales_of_e4m3_are_read_where_they_lie(scales, mode):
    lib = FakeLibrary()
    made = plan(GemmProblem(64, 6144, 4096), lib, scales)
    made.launch(16, 32, 48, 0, 0, 4096, 4112, 6144, 0, 1 << 20, 7, 64, 80)
    told = {args[1].value: args[2]._obj.value for args in lib.named("MatmulDescSetAttribute")}
    assert told == {3: 1, 15: 60, 31: mode, 32: mode, 17: 80, 18: 64}, "w is the left operand"
    kinds = [args[1:] for args in lib.named("MatrixLayoutCreate")]
    assert kinds[:2] == [(28, 4096, 6144, 4112), (28, 4096, 64, 4096)], "operands are e4m3"
    assert kinds[2] == (14, 6144, 64, 6144), "the result is bf16"
    made.launch(16, 32, 48, 0, 0, 4096, 4112, 6144, 0, 1 << 20, 7, 96, 80)
    assert len(lib.named("MatmulDescCreate")) == 2, "addresses have descriptors of their own"


def test_it_is_asked_before_a_launch():
    lib = FakeLibrary()
    made = plan(GemmProblem(64, 6144, 4096), lib, "row")
    made.ask()
    made.launch(16, 32, 48, 0, 0, 4096, 4096, 6144, 6144, 1 << 20, 7, 64, 80)
    assert len(lib.named("MatmulAlgoGetHeuristic")) == 1, "of rows without gaps the answer is kept"
    with pytest.raises(DeviceError, match="no algorithm"):
        plan(GemmProblem(64, 6144, 4096), FakeLibrary(algorithms=0), "row").ask()


def test_no_algorithm_is_an_error_with_a_remedy():
    with pytest.raises(DeviceError, match=r"no algorithm for 64x6144x4096.*backend="):
        launch(plan(GemmProblem(64, 6144, 4096), FakeLibrary(algorithms=0)))


@pytest.mark.parametrize(
    "changes",
    [{"batch_invariant": True}, {"epilogue": Epilogue(swiglu=True)},
     {"epilogue": Epilogue(activation="gelu")}, {"dtype": "fp32"}],
)  # fmt: skip
def test_what_it_does_not_serve(changes):
    binding = object.__new__(cublaslt.CublasLt)
    binding._lib, binding._handle = FakeLibrary(), ctypes.c_void_p(1)
    with pytest.raises(ArgumentError):
        binding.plan(GemmProblem(64, 6144, 4096, **changes), BUDGET)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch ships the library")
def test_without_the_library_it_says_so():
    with pytest.raises(DeviceError, match="backend at None"):
        cublaslt.load_library()
