"""There is no backward, and whoever asks for one is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import smkern
from smkern.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
told = pytest.raises(ArgumentError, match=r"has no backward.*torch\.no_grad")


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def seen(call: Callable[[], Any]) -> Any:
    with Watching():
        return call()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 8, requires_grad=True)


def test_past_torchs_dispatcher_a_result_requires_no_gradient(x):
    assert not smkern.gemm(x, x).requires_grad


def attend(q: Tensor) -> Tensor:
    cache, table = torch.zeros(2, 1, 16, 1, 64), torch.zeros(1, 1, dtype=torch.int32)
    found: Tensor = smkern.paged_attention(q, *cache, table, torch.ones(1, dtype=torch.int32))
    return found


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "gemm": lambda x: smkern.gemm(x, x.detach()),
    "bias": lambda x: smkern.gemm(torch.ones(3, 4), torch.ones(8, 4), bias=x[0]),
    "gemm_swiglu": lambda x: smkern.gemm_swiglu(x, x.detach()),
    "rms_norm": lambda x: smkern.rms_norm(x, torch.ones(8)),
    "silu_and_mul": lambda x: smkern.silu_and_mul(x),
    "topk_softmax": lambda x: smkern.topk_softmax(x, 2)[0],
    "paged_attention": lambda x: attend(x.reshape(-1)[:1].expand(1, 1, 64).contiguous()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_backward_raises(x, name):
    found = seen(lambda: CALLS[name](x))
    with told:
        found.sum().backward()
    assert x.grad is None
    with torch.no_grad():
        assert not seen(lambda: CALLS[name](x)).requires_grad


@pytest.mark.slow
def test_a_compiled_function_runs_and_has_no_backward(x):
    w = torch.randn(4, 8)
    step = torch.compile(lambda x: smkern.gemm(x, w) * 2, backend="aot_eager", fullgraph=True)
    assert torch.allclose(step(x), 2 * x @ w.T, atol=1e-5)
    with told:
        step(x).sum().backward()
    with torch.no_grad():
        assert not step(x).requires_grad


def test_transforms(x):
    def total(y: Tensor) -> Tensor:
        return smkern.gemm(y, torch.ones(3, 8)).sum()

    y = x.detach()
    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
        with told:
            transform(total)(y)
    with told:
        torch.func.jvp(total, (y,), (y,))
    with told, forward_ad.dual_level():
        seen(lambda: total(forward_ad.make_dual(y, y)))
    other = torch.func.grad(lambda z: (z * z).sum() + total(y))(y)
    assert torch.equal(other, 2 * y)


def test_what_is_written_is_refused_before(x):
    residual, out = torch.ones(2, 8), torch.ones(2, 2)
    for call in (
        lambda: smkern.add_rms_norm(x, residual, torch.ones(8)),
        lambda: smkern.gemm(x, x, out=out),
    ):
        with told:
            seen(call)
    with pytest.raises(ArgumentError, match="out requires a gradient, and is written"):
        seen(lambda: smkern.gemm(torch.ones(1, 8), torch.ones(8, 8), out=x[:1]))
    with torch.inference_mode():
        out = torch.ones(2, 2)
    with pytest.raises(ArgumentError, match="out was made in torch"):
        seen(lambda: smkern.gemm(torch.ones(2, 8), torch.ones(2, 8), out=out))
    assert bool((residual == 1).all() and (out == 1).all())


def test_whole_numbers_have_no_gradient(x):
    lengths = torch.zeros(2, dtype=torch.int32)
    assert not seen(lambda: smkern.sample(x, lengths=lengths)).requires_grad
    assert lengths.tolist() == [1, 1]
    weights, experts = seen(lambda: smkern.topk_softmax(x, 2))
    assert weights.requires_grad
    assert not experts.requires_grad
