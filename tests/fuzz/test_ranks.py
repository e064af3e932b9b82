"""Models cut over ranks: parts that make up the whole or errors by name, under any schedule."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch

from smkern.errors import SmkernError
from smkern.latency import Ring, Size
from smkern.models import ModelConfig, Shard, TensorParallel, Weights
from tests.fuzz.conftest import Cases
from tests.fuzz.hostile import THINGS
from tests.models.generation import tiny
from tests.processes import on_processes
from tests.runtime.ranks import case


def some_config(random: Random) -> ModelConfig:
    """Small sizes, many of which several ranks can share."""
    kv_heads = random.choice((1, 2, 3, 4, 6))
    sizes = {
        "num_q_heads": kv_heads * random.choice((1, 2, 3, 4)), "num_kv_heads": kv_heads,
        "hidden_size": 32, "intermediate_size": 12 * random.randint(1, 4),
        "vocab_size": 12 * random.randint(1, 4), "num_layers": 1, "tied": random.random() < 0.3,
    }  # fmt: skip
    return tiny(random.choice(("qwen3-8b", "llama-3.1-8b")), **sizes)


def hostile(random: Random) -> Any:
    """What does not belong, or a small number that may."""
    return random.choice((random.choice(THINGS), lambda: random.randint(0, 4)))()


def test_parts_make_up_the_whole(cases: Cases) -> None:
    for random in cases(12):
        config, size = some_config(random), random.randint(1, 6)
        with suppress(SmkernError):
            parts = [Weights.random(config, 1, shard=Shard(rank, size)) for rank in range(size)]
            _check_parts(config, size, parts)


def _check_parts(config: ModelConfig, size: int, parts: list[Weights]) -> None:
    whole = Weights.random(config, 1).named()
    names = [part.named() for part in parts]
    for name, tensor in whole.items():
        pieces = [found[name] for found in names]
        if any(x in name for x in ("k_proj", "v_proj")) and size > config.num_kv_heads:
            pieces = pieces[:: size // config.num_kv_heads]  # those between have the same heads
        elif tensor.dim() == 1:
            assert all(torch.equal(tensor, piece) for piece in pieces), name
            continue
        dim = -1 if any(x in name for x in ("o_proj", "down_proj")) else 0
        assert torch.equal(tensor, torch.cat(pieces, dim)), (name, config, size)


def test_arguments_are_taken_or_refused_by_name(cases: Cases) -> None:
    for random in cases(300):
        with suppress(SmkernError):
            Shard(hostile(random), hostile(random)).config(tiny())
        with suppress(SmkernError):
            TensorParallel(hostile(random), hostile(random))
        with suppress(SmkernError):
            given = [hostile(random) for _ in range(5)]
            us = Ring(*given, measured=hostile(random)).launch_us(Size(batch=3, total_kv=9))
            assert us >= 0


@pytest.mark.parametrize("size", [2])
def test_tokens_under_any_schedule(cases: Cases, size: int) -> None:
    for random in cases(1):
        seeds = random.randrange(1 << 30), random.randrange(1 << 30)
        found = on_processes(size, case.serve, size, 5, seeds, 20.0)
        assert [outcome.error for outcome in found] == [""] * size
        first, second = found[0].result
        assert first == second
