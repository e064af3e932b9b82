"""The path of a GPU's calls, on a driver that does nothing: smkern's own errors, no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from inspect import signature
from typing import Any

import pytest

import smkern
from smkern.errors import SmkernError
from tests.fuzz import operators, paged
from tests.fuzz.conftest import Cases
from tests.fuzz.hostile import changed
from tests.ops.fake_layer import FakeLayer, without_driver

MAKERS = {
    "gemm": operators.gemm,
    "gemm_swiglu": operators.gemm_swiglu,
    "rms_norm": operators.rms_norm,
    "qk_norm_rope_append": paged.qk_norm_rope_append,
    "paged_attention": paged.paged_attention,
}
PATHS = {"gemm": "gemm", "gemm_swiglu": "swiglu", "rms_norm": "norm",
         "qk_norm_rope_append": "append", "paged_attention": "attention"}  # fmt: skip


@pytest.fixture(scope="module")
def layer() -> Iterator[FakeLayer]:
    with without_driver():
        yield FakeLayer()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch has some of tensors so odd
@pytest.mark.parametrize("name", MAKERS)
def test_what_does_not_belong_is_refused_by_name(layer: FakeLayer, name: str, cases: Cases) -> None:
    eager, parameters = getattr(layer, PATHS[name]), signature(getattr(smkern, name)).parameters
    fields = [x for x in eager.op.call._fields if x in parameters]
    served = 0
    for random in cases(300):
        arguments: dict[str, Any] = {x: parameters[x].default for x in fields}
        arguments |= MAKERS[name](random).arguments
        arguments.pop("check", None)  # there is no device to read
        if random.random() < 0.8:
            where = random.choice(fields)
            arguments[where] = changed(random, arguments.get(where))
        if "check" in fields:
            arguments["check"] = False
        with suppress(SmkernError):
            eager(eager.op.call(**arguments))
            served += 1
    assert served
