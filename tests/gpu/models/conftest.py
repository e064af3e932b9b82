"""One model at a time on the GPU, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.models.support import Pair
from tests.models.peers import FAMILIES

MODELS = [(family, width) for width in ("small", "wide") for family in FAMILIES]


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair.make(*request.param)
    yield made
    del made
    torch.cuda.empty_cache()
