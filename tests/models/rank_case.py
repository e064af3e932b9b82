"""A rank as a process of its own: what a run of torchrun goes through."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from smkern.errors import SmkernError
from smkern.models import Decoder, TensorParallel, Weights, preset
from tests.models.session import Session


def told(run: Callable[[], Any]) -> str:
    """What it raised; the empty text for nothing."""
    try:
        run()
    except (SmkernError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compare() -> dict[str, Any]:
    """Logits of a small model, and what ranks that differ are told."""
    found: dict[str, Any] = {}
    tp = TensorParallel.from_env(int(os.environ["WORLD_SIZE"]), "cpu", timeout_s=20)
    config = preset("qwen3-8b").replace(
        num_layers=2, hidden_size=64, num_q_heads=4, num_kv_heads=2,
        intermediate_size=96, vocab_size=64, dtype=torch.float32, max_position=64,
    )  # fmt: skip
    decoder = Decoder(config, Weights.random(config, shard=tp.shard), tp=tp)
    with torch.inference_mode():
        session = Session.make(decoder, 2, 64)
        logits = [session.logits([[1, 2, 3], [4]]), session.logits([[5], [6]], ragged=False)]
    found["logits"] = torch.stack(logits).tolist()
    found["everyone"] = tp.everyones(10 + tp.rank)

    longer = config.replace(num_layers=2 + tp.rank)
    weights = Weights.random(longer, shard=tp.shard)
    found["layers"] = told(lambda: Decoder(longer, weights, tp=tp))
    mode = tp.rank == 1
    weights = Weights.random(config, shard=tp.shard)
    found["mode"] = told(lambda: Decoder(config, weights, tp=tp, batch_invariant=mode))
    weights.final_norm.fill_(1.0 + tp.rank)
    found["norms"] = told(lambda: Decoder(config, weights, tp=tp))
    wrong = Weights.random(config) if tp.rank == 1 else weights
    found["part"] = told(lambda: Decoder(config, wrong, tp=tp))
    tp.close()
    return found
