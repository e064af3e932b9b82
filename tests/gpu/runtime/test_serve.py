"""`smkern.serve` on a GPU: graphs captured ahead, prompts beside decode, everything closed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import smkern
from smkern.kv import KvPool
from smkern.models import Decoder, ModelConfig, SamplingParams
from smkern.runtime import Multiplexer
from tests.gpu.models.support import small_weights
from tests.runtime.alone import pool_of

RUNG = 16
LENGTHS = [300, 17, 9, 129, 64, 511, 40, 33]


@contextmanager
def serving(
    num_pages: int, rungs: list[int | None], *, reuse: bool
) -> Iterator[tuple[Multiplexer, KvPool, ModelConfig]]:
    """A small model on a split, with graphs captured ahead for these rungs."""
    weights = small_weights(max_position=2048)
    config = weights.config
    pool = pool_of(config, num_pages, device="cuda", reuse=reuse)
    policy = smkern.policies.StaticSplit(RUNG, layers=1, move=False)
    with smkern.ladder([RUNG]) as ladder:
        mux = smkern.serve(
            Decoder(config, weights), pool, ladder=ladder, policy=policy, max_running=8,
            max_prefill=2, max_tokens=512, rungs=rungs,
        )  # fmt: skip
        yield mux, pool, config
        mux.close()


def test_a_crowd_on_a_split() -> None:
    draw = Random(1)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with serving(400, [None, RUNG], reuse=True) as (mux, pool, config):
        graphs = mux.memory_report().graphs
        assert graphs > 0
        handles = []
        for length in LENGTHS:
            prompt = [draw.randrange(config.vocab_size) for _ in range(length)]
            handles.append(mux.submit(prompt, params))
            mux.step()
        for output in mux.run():
            assert output.error is None
        assert [len(handle.tokens) for handle in handles] == [20] * len(LENGTHS)
        assert mux.memory_report().graphs == graphs, "all that is needed was captured ahead"
        places = {span.place.num_sms for span in mux.timeline.trace().spans}
        assert RUNG in places, "decode ran on its side"
        pool.poll()
        pool.check()
        assert pool.usage.held == 0


def test_missed_graphs_are_captured_when_nothing_runs() -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with serving(100, [None], reuse=False) as (mux, *_):
        before, tokens = mux.memory_report().graphs, []
        for _ in range(2):
            handles = [mux.submit([1] * length, params) for length in LENGTHS[1:4]]
            for output in mux.run():
                assert output.error is None
            tokens.append([len(handle.tokens) for handle in handles])
            for _ in range(3):
                assert mux.step() == []
        assert mux.memory_report().graphs > before
        assert tokens == [[6] * 3] * 2
        assert not [note for note in mux.timeline.trace().notes if note.name == "put off"]
