"""Linear layers by `smkern.gemm`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from smkern.errors import ArgumentError
from smkern.integrations.transformers import Linear, swap_linear
from tests.integrations.families import model_of, prompts


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 64), (2, 3, 64)])
def test_a_layer_is_the_linear_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(shape, dtype=torch.bfloat16)
    wanted = layer(x)
    assert swap_linear(layer) == ("",)
    assert isinstance(layer, Linear)
    torch.testing.assert_close(layer(x), wanted, rtol=1e-2, atol=1e-2)


def test_rows_of_another_width_are_named() -> None:
    layer = Linear(64, 48, dtype=torch.bfloat16).requires_grad_(False)
    with pytest.raises(ArgumentError, match=r"input has shape \[2, 32\], .* takes rows of 64"):
        layer(torch.ones(2, 32, dtype=torch.bfloat16))


@torch.no_grad()
def test_a_model_keeps_its_parameters_and_its_logits() -> None:
    model = model_of("Llama", "smkern").bfloat16()
    ids, parameters = prompts(2, 9), dict(model.named_parameters())
    wanted = model(ids).logits
    names = swap_linear(model, only=lambda name, layer: name != "lm_head")
    assert "model.layers.1.mlp.down_proj" in names
    assert len(names) == 14
    assert type(model.lm_head) is nn.Linear
    assert all(parameters[name] is p for name, p in model.named_parameters())
    torch.testing.assert_close(model(ids).logits, wanted, rtol=2e-2, atol=6e-2)


def test_layers_of_other_kinds_are_left_alone() -> None:
    class Adapted(nn.Linear):
        pass

    model = nn.Sequential(Adapted(64, 64).bfloat16(), nn.Linear(64, 64), nn.Identity())
    assert swap_linear(model) == ()


def test_a_layer_whose_forward_was_replaced_is_left_alone() -> None:
    hooked, plain = (nn.Linear(64, 64).bfloat16() for _ in range(2))
    inner = hooked.forward
    hooked.forward = lambda *args: inner(*args)  # as hooks of accelerate do
    assert swap_linear(nn.Sequential(hooked, plain)) == ("1",)
    assert type(hooked) is nn.Linear


def test_a_gradient_raises() -> None:
    layer = Linear(64, 48, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"torch.no_grad\(\), or leave this layer out"):
        layer(torch.zeros(2, 64, dtype=torch.bfloat16))
    with torch.no_grad():
        layer(torch.zeros(2, 64, dtype=torch.bfloat16))
