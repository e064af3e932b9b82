"""Nothing is looked for on a network, and transformers keeps its notes to itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import smkern.integrations.transformers as st


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from transformers import logging

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    st.register()
    yield
    logging.set_verbosity(verbosity)
