"""Eager products on e4m3 by cuBLASLt, in place of a driver and a library."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import c_void_p
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import smkern
from smkern.errors import DeviceError
from smkern.kernels.cublaslt import CublasLt
from smkern.ops.fp8.call import ScaledGemm
from smkern.ops.fp8.gemm import SCALED_GEMM
from smkern.ops.fp8.swiglu import QUANTIZED_SWIGLU, SCALED_SWIGLU
from smkern.ops.fp8.warmup import librarys
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.streams import Streams
from smkern.ops.workspace import Workspaces
from smkern.tuning.fp8 import ScaledProblem
from tests.ops.fake_layer import Launched
from tests.ops.fp8_launches import BUDGET, WHOLE, gemms, recorded, rows, run
from tests.ops.test_cublaslt import FakeLibrary


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    with recorded() as found:
        yield found


class Library:
    """cuBLASLt that notes what it is asked to launch; an `old` one has no scales of rows."""

    def __init__(self, old=False):
        self.launched, self.old = [], old

    def plan(self, problem, budget, scales):
        def launch(*numbers):
            self.launched.append((problem, scales, numbers))

        def ask():
            if self.old and scales == "row":
                raise DeviceError("cublasLtMatmulDescSetAttribute(31) failed")

        return SimpleNamespace(launch=launch, ask=ask, workspace_bytes=1 << 20)


def vectors(m, n, apart=0):
    """Scales of rows, those of a so many elements behind whole 16 bytes."""
    room = torch.ones(m + 8)
    first = -room.data_ptr() // 4 % 4
    return room[first + apart :][:m], torch.ones(n)


def test_scales_that_begin_anywhere_are_not_the_librarys(launched):
    a, w = rows(800, 256, 256), rows(64, 256, 256)
    dispatcher, library = gemms(), Library()
    with patch("smkern.kernels.fp8.library_launch.library_of", lambda index: library):
        streams = Streams(lambda: -1, lambda index: 7, lambda raw, index: WHOLE, lambda: False)
        workspaces = Workspaces(torch.device("cpu"), streams.capturing, lambda raw: 0)
        op = EagerOperator(SCALED_GEMM, -1, dispatcher, streams, workspaces)
        with patch("smkern.ops.checks.check_capability"):
            for apart, of_library in ((0, 1), (1, 1), (0, 2), (3, 2)):
                op(ScaledGemm(a, w, *vectors(800, 64, apart)))
                assert len(library.launched) == of_library, "one layout has a record for each"
    assert len(launched) == 2


def test_a_library_without_such_scales_gives_way(launched):
    a, w = rows(800, 256, 256), rows(64, 256, 256)
    call = ScaledGemm(a, w, *vectors(800, 64))
    dispatcher, library = gemms(), Library(old=True)
    with patch("smkern.kernels.fp8.library_launch.library_of", lambda index: library):
        run(SCALED_GEMM, call, dispatcher, budget=WHOLE)
        assert (len(launched), library.launched) == (1, [])
        with pytest.raises(DeviceError, match="failed"):
            run(SCALED_GEMM, call._replace(backend="cublaslt"), dispatcher, budget=WHOLE)
        run(SCALED_GEMM, call._replace(a_scale=torch.ones(1), w_scale=torch.ones(1)), dispatcher,
            budget=WHOLE)  # fmt: skip
        assert len(library.launched) == 1, "it has those of matrices"


@pytest.mark.parametrize(("scales", "m"), [("matrix", 80), ("row", 800)])
def test_many_rows_on_the_whole_device_are_the_librarys(scales, m, launched):
    a, w = rows(m, 256, 272), rows(64, 256, 256)
    one = scales == "matrix"
    a_scale, w_scale = (torch.ones(1), torch.ones(1)) if one else vectors(m, 64)
    residual = torch.zeros(m, 80).bfloat16()[:, :64]
    call = ScaledGemm(a, w, a_scale, w_scale, residual=residual)
    dispatcher, library = gemms(), Library()
    with patch("smkern.kernels.fp8.library_launch.library_of", lambda index: library):
        own = call._replace(backend="own")
        out = run(SCALED_GEMM, own, dispatcher, budget=WHOLE)
        assert not library.launched
        run(SCALED_GEMM, call, dispatcher, capturing=True, budget=WHOLE)
        assert not library.launched, "a capture takes none that never ran"
        assert len(launched) == 2
        out = run(SCALED_GEMM, call, dispatcher, budget=WHOLE)
        run(SCALED_GEMM, call, dispatcher, capturing=True, budget=WHOLE)
    assert len(launched) == 2
    (problem, given, numbers), again = library.launched
    assert (problem.m, problem.n, problem.k, problem.epilogue.key) == (m, 64, 256, "residual")
    assert given == scales
    assert numbers[:3] == (a.data_ptr(), w.data_ptr(), out.data_ptr())
    assert numbers[3:9] == (0, residual.data_ptr(), 272, 256, 64, 80)
    assert numbers[10:] == (7, a_scale.data_ptr(), w_scale.data_ptr())
    assert again[2][-2:] == numbers[-2:]


@pytest.mark.parametrize("op", [SCALED_GEMM, SCALED_SWIGLU, QUANTIZED_SWIGLU], ids=lambda x: x.name)
def test_what_a_capture_gets_instead_of_the_library_serves_no_call_outside_it(op, launched):
    m, library, capturing = 800, Library(), [True]
    more = (torch.ones(m),) if op is QUANTIZED_SWIGLU else ()
    call = op.call(rows(m, 256, 256), rows(512, 256, 256), *vectors(m, 512), *more)
    dispatcher = gemms()
    dispatcher.launch(ScaledProblem(m, 512, 256, kernel="own"), WHOLE)
    silu = SimpleNamespace(launch=lambda *choice, capturing: lambda *numbers: None)
    streams = Streams(lambda: -1, lambda index: 7, lambda raw, index: WHOLE, lambda: capturing[0])
    workspaces = Workspaces(torch.device("cpu"), streams.capturing, lambda raw: 1)
    eager = EagerOperator(op, -1, dispatcher, streams, workspaces)
    with (
        patch("smkern.kernels.fp8.library_launch.library_of", lambda index: library),
        patch("smkern.ops.checks.check_capability"),
        patch("smkern.ops.fp8.swiglu.rows_dispatcher", lambda index: silu),
        patch("smkern.ops.fp8.swiglu.quant_dispatcher", lambda index: silu),
    ):
        eager(call)
        assert (len(launched), len(library.launched)) == (1, 0)
        capturing[0] = False
        eager(call)
        assert (len(launched), len(library.launched)) == (1, 1)


def test_the_library_is_asked_once_for_rows_without_gaps(launched):
    """What it chose when it was asked whether it can also serves the launch."""
    asked, binding = FakeLibrary(), object.__new__(CublasLt)
    binding._lib, binding._handle = asked, c_void_p(1)
    call = ScaledGemm(rows(800, 256, 256), rows(64, 256, 256), *vectors(800, 64))
    with patch("smkern.kernels.fp8.library_launch.library_of", lambda index: binding):
        run(SCALED_GEMM, call, gemms(), budget=WHOLE)
    assert len(asked.named("Matmul")) == 1
    assert len(asked.named("MatmulAlgoGetHeuristic")) == 1


def test_a_warmup_launches_each_choice_of_the_library():
    dispatcher = gemms()
    calls = smkern.Fp8Calls(shapes=[(64, 256)], max_m=900, batch_invariant=[False, True])
    kinds = [*calls.problems(True)]
    found = [(p.scales, p.m) for p, _, _ in librarys(dispatcher, kinds, 900, [BUDGET, WHOLE])]
    by_row = [(scales, m) for scales, m in found if scales == "row"]
    assert by_row == [("row", 832), ("row", 896), ("row", 960)]
    assert {("matrix", 80), ("matrix", 97)} <= {*found}  # its kernel may be another at each M
    assert ("matrix", 64) not in found
    blocks = smkern.Fp8Calls(shapes=[(64, 256)], blocks=True).problems(True)
    assert not [*librarys(dispatcher, [*blocks], 700, [WHOLE])]
