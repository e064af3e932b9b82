"""Compiles, before the first attention test, every kernel that the collected ones will launch."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.attention.cases import Case
from tests.gpu.attention.support import precompile


@pytest.fixture(scope="session", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """From the tests' parameters: a Case, and a `backend` beside it.

    A module lists what else it launches as COMPILED: pairs of a case and a backend.
    """
    if not torch.cuda.is_available():
        return
    wanted: set[tuple[Case, str | None]] = set()
    for item in request.session.items:
        wanted.update(getattr(getattr(item, "module", None), "COMPILED", ()))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        for value in params.values():
            if isinstance(value, Case):
                wanted.add((value, params.get("backend")))
    precompile(wanted)
