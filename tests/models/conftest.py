"""Fixtures of the models' tests: small models of each family, as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.peers import FAMILIES, Peer, make_peer


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def peer(family: str, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """A transformers model in fp32 with its folder, of two layers."""
    torch.manual_seed(7)
    made = make_peer(family)
    made.model.save_pretrained(tmp_path_factory.mktemp(family))
    return made


@pytest.fixture
def folder(peer: Peer, tmp_path: Path) -> Path:
    """A folder of the peer's own that a test may spoil."""
    peer.model.save_pretrained(tmp_path)
    return tmp_path
