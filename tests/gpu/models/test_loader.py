"""Checkpoints loaded onto a GPU, sharded and converted on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smkern.models import Weights
from tests.models.peers import FAMILIES, make_peer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_gets_what_the_files_hold(family: str, tmp_path: Path):
    make_peer(family).model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    there = Weights.load(tmp_path, device="cuda", dtype=torch.bfloat16)
    here = Weights.load(tmp_path, dtype=torch.bfloat16)
    for got, want in zip(there.tensors(), here.tensors(), strict=True):
        assert got.is_cuda
        assert torch.equal(got.cpu(), want)
