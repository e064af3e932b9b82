"""What a GPU's calls refuse by name where torch itself would raise, or lie; nothing is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import smkern
from smkern.errors import ArgumentError

HALF = torch.bfloat16
told = pytest.raises(ArgumentError, match=r"has no backward.*torch\.no_grad")


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 64, device="cuda").to(HALF), torch.randn(32, 64, device="cuda").to(HALF)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 64), torch.ones(2, 64)]).cuda().to(HALF)


@pytest.mark.parametrize("name", ["a", "w", "out"])
@pytest.mark.parametrize("kind", ["nested", "sparse", "meta", "list"])
def test_tensors_that_are_no_matrix_here(operands, name, kind):
    a, w = operands
    given: dict[str, Any] = {"a": a, "w": w, "out": torch.full((4, 32), 7.0).cuda().to(HALF)}
    out = given["out"]
    x = given[name]
    odd = {"nested": nested, "sparse": x.to_sparse, "meta": lambda: x.to("meta"), "list": x.tolist}
    given[name] = odd[kind]()
    with pytest.raises(ArgumentError, match=rf"{name} |a on"):
        smkern.gemm(given["a"], given["w"], out=given["out"])
    assert bool((out == 7).all())
    smkern.gemm(*operands)


def test_gradients(operands):
    a, w = operands
    w.requires_grad_()
    assert not smkern.gemm(a, w).requires_grad
    found = torch.ops.smkern.gemm(a, w)
    with told:
        found.sum().backward()
    out = torch.full((4, 32), 7.0, device="cuda", dtype=HALF)
    with told:
        torch.ops.smkern.gemm_out(a, w, out)
    assert bool((out == 7).all())
    with told:
        torch.func.grad(lambda x: smkern.gemm(x, w.detach()).sum())(a)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_function_has_no_backward(operands, backend):
    a, w = operands
    step = torch.compile(lambda a, w: smkern.gemm(a, w) * 2, backend=backend, fullgraph=True)
    w.requires_grad_()
    found = step(a, w)
    torch.testing.assert_close(found, 2 * smkern.gemm(a, w), rtol=2e-2, atol=2e-2)
    with told:
        found.sum().backward()
    with torch.no_grad():
        assert not step(a, w).requires_grad
