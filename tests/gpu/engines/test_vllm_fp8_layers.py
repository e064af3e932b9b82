"""Linear layers of fp8 checkpoints as vLLM starts them, on stubs of its classes, without vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smkern
from smkern.bench.engines.cases import BLOCKS
from smkern.integrations import vllm as ours
from smkern.ops.reference import fp8
from tests.integrations.vllm import linear_stubs, stubs
from tests.models.fp8_checkpoints import compressed
from tests.ops.tensors import default_dtype

STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
INPUT_SCALE = 8 / 448
PARTS, COLUMNS = (384, 128), 512


def load(layer: Any, weights: list[Tensor], how: str) -> Tensor:
    """Fill a layer, a projection at a time; returns what its weights stand for, in fp64."""
    stand_for = []
    for shard, weight in enumerate(weights):
        values, scales = fp8.quantize(weight, how)
        stand_for.append(fp8.dequantize(values, scales, torch.float64))
        given = {"weight": values, "input_scale": torch.tensor(INPUT_SCALE, device=weight.device)}
        for name, parameter in layer.named_parameters():
            found = given.get(name, scales[:, None] if how == "token" else scales)
            parameter.weight_loader(parameter, found, shard)
    return torch.cat(stand_for)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("said", "how", "rounds"),
    [
        (BLOCKS, "weight_block", "block"),
        (compressed("channel", "token"), "token", "token"),
        (STATIC, "tensor", "tensor"),
    ],
    ids=["blocks", "channels", "static"],
)
def test_a_layer_is_captured_without_a_load_and_right(
    said, how, rounds, has_bias, monkeypatch
) -> None:
    monkeypatch.setattr(linear_stubs, "DTYPE", torch.bfloat16)
    torch.manual_seed(3)
    with stubs.stubbed(), torch.device("cuda"):
        ours.register()
        config = linear_stubs.QUANTIZED["smkern"].from_config({**said})
        layer: Any = linear_stubs.LinearBase(None, COLUMNS, [*PARTS], config=config)
        weight = load(layer, [k * torch.randn(n, COLUMNS) for k, n in enumerate(PARTS, 1)], how)
        bias = torch.randn(sum(PARTS)).bfloat16() if has_bias else None
        layer.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        with default_dtype(torch.bfloat16):
            layer.quant_method.process_weights_after_loading(layer)
        torch.cuda.synchronize()
        before = smkern.counters()
        for rows in (1, 17, 64):
            x = torch.randn(rows, COLUMNS).bfloat16()
            found = layer.quant_method.apply(layer, x, bias)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = layer.quant_method.apply(layer, x, bias)
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, found)
            with torch.device("cpu"):  # torch divides by a number in another way on a GPU
                values, scales = fp8.quantize(x.cpu(), rounds)
                if said is STATIC:
                    scales = torch.tensor([INPUT_SCALE])
                    values = fp8.quantize_by(x.cpu(), scales)
            stand_for = fp8.dequantize(values.cuda(), scales.cuda(), torch.float64)
            expected = stand_for @ weight.T
            expected += 0.0 if bias is None else bias.double()
            torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=0.05)
        assert smkern.counters() == before
