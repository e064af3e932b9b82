"""Streams over HTTP for minutes, some of whose clients hang up: nothing is lost, mixed or kept."""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random

import torch

from smkern.bench.http_streams import behind_front
from smkern.bench.rows import Cell
from smkern.bench.soak_streams import Soaked, Text, rss_mib, samples, watch_soak, wrong_metrics
from smkern.models import SamplingParams
from smkern.runtime.multiplexer import Multiplexer
from smkern.server.messages import Ready
from smkern.server.model import EngineOptions, open_runtime

TEXTS = 16
LONGEST_PROMPT, LONGEST_REPLY = 512, 128
"""Tokens; at most a quarter and an eighth of the context."""


def soak(options: EngineOptions, name: str, *, streams: int, seconds: float) -> Cell:
    """Have so many streams come one behind another; a cell of what was wrong, and of leaks.

    Tokens depend on a request alone (`batch_invariant`), so each is compared with the one that was
    drawn with nothing beside it.
    """
    with open_runtime(replace(options, batch_invariant=True)) as (mux, ready):
        texts = texts_of(mux, ready)
        before, pages = samples(mux.metrics_text()), _held_pages(mux)
        gpu, rss = [_gpu_mib()], [rss_mib(os.getpid())]
        seen: Soaked = behind_front(mux, ready, watch_soak, texts, streams, seconds)
        gpu.append(_gpu_mib())
        rss.append(rss_mib(os.getpid()))
        found = {
            "requests": seen.requests, "hangups": seen.hangups, "tokens": seen.tokens,
            "wrong_metrics": wrong_metrics(seen, before), "is_idle": mux.is_idle,
            "held_pages": [pages, _held_pages(mux)], "server_rss_mib": seen.rss_mib,
            "engine_rss_mib": rss, "gpu_mib": gpu, "took_s": round(seen.took_s, 1),
        }  # fmt: skip
    case = {"model": name, "name": "soak", "streams": streams, "policy": options.policy}
    cell = {"op": "server", "case": case, "provider": "smkern", "unit": "requests"}
    return cell | {"value": float(seen.wrong), **found}


def texts_of(mux: Multiplexer, ready: Ready) -> list[Text]:
    """Texts and their replies, one at a time, with nothing beside them."""
    draw, made = Random(5), []
    longest = min(LONGEST_PROMPT, ready.max_context // 4)
    most = min(LONGEST_REPLY, ready.max_context // 8)
    for _ in range(TEXTS):
        prompt = [draw.randrange(ready.vocab_size) for _ in range(draw.randint(1, longest))]
        length = draw.randint(most // 4, most)
        mux.submit(prompt, SamplingParams(max_new_tokens=length, ignore_eos=True))
        reply = []
        for output in mux.run():
            if output.error is not None:
                raise output.error
            if output.token is not None:
                reply.append(output.token)
        made.append(Text(prompt, reply))
    return made


def _held_pages(mux: Multiplexer) -> int:
    return int(mux._executor.pool.usage.held)


def _gpu_mib() -> float:
    return torch.cuda.memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
