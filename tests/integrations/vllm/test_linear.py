"""vLLM's linear layers by smkern's GEMM, on CPU tensors and stubs of vLLM's classes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import smkern
from smkern.errors import ConfigError
from smkern.integrations import vllm as ours
from tests.integrations.vllm import stubs
from tests.integrations.vllm.linear_stubs import QUANTIZED, LinearBase


@pytest.fixture(autouse=True)
def _stubbed() -> Iterator[None]:
    with stubs.stubbed():
        yield


def made_config() -> Any:
    ours.register()
    return QUANTIZED["smkern"]()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [(3,), (2, 5)], ids=str)
def test_a_layer_is_its_product(rows: tuple[int, ...], has_bias: bool) -> None:
    made = made_config()
    layer = LinearBase(None, 64, 32, config=made)
    nn.init.normal_(layer.weight)
    layer.quant_method.process_weights_after_loading(layer)
    x, bias = torch.randn(*rows, 64), torch.randn(32) if has_bias else None
    found = layer.quant_method.apply(layer, x, bias)
    expected = nn.functional.linear(x, layer.weight, bias)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_other_layers_stay_as_they_are() -> None:
    assert made_config().get_quant_method(nn.Embedding(2, 2), "lm_head") is None


def test_who_asks_for_these_layers_gets_them_whatever_a_checkpoint_says_of_itself() -> None:
    made = made_config()
    assert made.override_quantization_method({"quant_method": "fp8"}, "smkern") == "smkern"
    assert made.override_quantization_method({"quant_method": "fp8"}, None) is None
    assert made.override_quantization_method({"quant_method": "fp8"}, "fp8", None) is None


def test_another_vllm_is_refused_where_the_layers_are_asked_for() -> None:
    with stubs.stubbed("0.34.0"):
        ours.register()
        with pytest.raises(ConfigError, match=r"vLLM 0\.34\.0: .* 0\.26"):
            QUANTIZED["smkern"]()


def test_layers_of_one_shape_are_warmed_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(smkern, "warmup", lambda **given: asked.append(given["shapes"]))
    monkeypatch.setattr(smkern, "current_num_sms", lambda: 132)
    made, other = made_config(), made_config()
    for config, rows in ((made, 64), (made, 32), (made, 64), (other, 64)):
        method = config.get_quant_method(LinearBase.__new__(LinearBase), "")
        weight = SimpleNamespace(is_cuda=True, shape=(rows, 16), dtype=torch.bfloat16)
        method.process_weights_after_loading(SimpleNamespace(weight=weight))
    assert asked == [[(64, 16)], [(32, 16)], [(64, 16)]]


@pytest.mark.parametrize("asked", [False, True])
def test_rows_alone_where_vllm_is_asked_for_batch_invariance(monkeypatch, asked: bool) -> None:
    """As stock's layers, which these stand in for; what is compiled before is what is launched."""
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", asked)
    found, gemm = [], smkern.gemm

    def spy(*given: Any, batch_invariant: bool = False, **named: Any) -> torch.Tensor:
        found.append(batch_invariant)
        return gemm(*given, **named)

    monkeypatch.setattr(smkern, "gemm", spy)
    monkeypatch.setattr(smkern, "warmup", lambda **given: found.extend(given["batch_invariant"]))
    monkeypatch.setattr(smkern, "current_num_sms", lambda: 132)
    layer = LinearBase(None, 64, 32, config=made_config())
    layer.quant_method.apply(layer, torch.randn(3, 64))
    weight = SimpleNamespace(is_cuda=True, shape=(64, 32), dtype=torch.bfloat16)
    layer.quant_method.process_weights_after_loading(SimpleNamespace(weight=weight))
    assert found == [asked, asked]
