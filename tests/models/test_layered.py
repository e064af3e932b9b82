"""Layers that stand for all in the run ahead of a capture."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from smkern import ops
from smkern.models import Decoder, ModelConfig, Weights, decoder, products
from smkern.models.layered import all_layers, warming_layers
from tests.models.peers import FAMILIES, hf_config, prompts
from tests.models.session import Session

LENGTHS = (5, 1, 9)


def _kind(value: Any) -> Any:
    """What of an argument may choose another kernel."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.stride()
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def _recording(calls: set[Any]) -> ModuleType:
    """The operators, noting how they are called."""
    module = ModuleType("ops")

    def recorded(name: str, operator: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            tensors = [x for x in (*args, *named.values()) if isinstance(x, Tensor)]
            out = named.get("out")
            in_place = isinstance(out, Tensor) and [x.data_ptr() for x in tensors].count(
                out.data_ptr()
            )
            given = tuple(_kind(x) for x in args), *((k, _kind(v)) for k, v in named.items())
            calls.add((name, *given, in_place))
            return operator(*args, **named)

        return call

    for name in ops.__all__:
        found = getattr(ops, name)
        setattr(module, name, recorded(name, found) if callable(found) else found)
    return module


@pytest.mark.parametrize("dtype", [None, "fp8-channel"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoders_layers_are_called_as_those_that_stand_for_all(
    family: str, num_layers: int, ragged: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.from_hf(hf_config(family)).replace(num_layers=num_layers)
    weights = Weights.random(config, 5, dtype=dtype)
    model = Decoder(weights.config, weights)
    assert len(model.representative_layers) == min(num_layers, 3)
    session = Session.make(model, len(LENGTHS))
    session.logits(prompts(LENGTHS))
    step = session.step(prompts(LENGTHS if ragged else (1, 1, 1)), ragged=ragged).planned()
    called: list[set[Any]] = []
    for layers in (warming_layers, all_layers):
        called.append(set())
        for module in (decoder, products):
            monkeypatch.setattr(module, "ops", _recording(called[-1]))
        layers(model, step)
        model.head(step)
    assert called[0] == called[1]
    assert len(called[0]) > 3
