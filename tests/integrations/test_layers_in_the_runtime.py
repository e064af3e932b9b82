"""A transformers model on the runtime's executor: layers, decode steps and mixed forwards."""

from __future__ import annotations

import pytest
import torch

from tests.integrations.serving import NEW, Serving
from tests.models.peers import FAMILIES, make_peer, prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_each_token_is_transformers_best_behind_those_before_it(family: str) -> None:
    torch.manual_seed(4)
    peer = make_peer(family)
    serving = Serving(peer.model, prompts((20, 3, 33)))
    serving.run()
    peer.model.set_attn_implementation("eager")
    for request in serving.requests:
        drawn = serving.drawn(request)
        assert len(drawn) == NEW
        scores = peer.logits(request.ids)[request.prompt_len - 1 : -1]
        chosen = scores.gather(1, drawn[:, None])[:, 0]
        assert bool((chosen >= scores.max(1).values - 1e-4).all())
