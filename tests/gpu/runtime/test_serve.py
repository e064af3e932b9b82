"""`smkern.serve` on a GPU: graphs captured ahead, prompts beside decode, everything closed."""

from __future__ import annotations

from random import Random

import torch

import smkern
from smkern.kv import KvPool, KvSizes
from smkern.models import Decoder, ModelConfig, SamplingParams, Weights
from tests.models.peers import hf_config

RUNG = 16
LENGTHS = [300, 17, 9, 129, 64, 511, 40, 33]


def test_a_crowd_on_a_split() -> None:
    config = ModelConfig.from_hf(hf_config("qwen3", max_position_embeddings=2048))
    config = config.replace(dtype=torch.bfloat16)
    decoder = Decoder(config, Weights.random(config, 5, "cuda"))
    sizes = KvSizes(config.num_layers, config.num_kv_heads, config.head_dim)
    pool = KvPool(sizes, num_pages=400, device="cuda")
    draw = Random(1)
    policy = smkern.policies.StaticSplit(RUNG, layers=1, move=False)
    with smkern.ladder([RUNG]) as ladder:
        mux = smkern.serve(
            decoder, pool, ladder=ladder, policy=policy, max_running=8, max_prefill=2,
            max_tokens=512, rungs=[None, RUNG],
        )  # fmt: skip
        graphs = mux.memory_report().graphs
        assert graphs > 0
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        handles = []
        for length in LENGTHS:
            handles.append(
                mux.submit([draw.randrange(config.vocab_size) for _ in range(length)], params)
            )
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
        mux.close()


def test_missed_graphs_are_captured_when_nothing_runs() -> None:
    config = ModelConfig.from_hf(hf_config("qwen3", max_position_embeddings=2048))
    config = config.replace(dtype=torch.bfloat16)
    decoder = Decoder(config, Weights.random(config, 5, "cuda"))
    pool = KvPool(
        KvSizes(config.num_layers, config.num_kv_heads, config.head_dim),
        num_pages=100,
        device="cuda",
        reuse=False,
    )
    policy = smkern.policies.StaticSplit(RUNG, layers=1, move=False)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with smkern.ladder([RUNG]) as ladder:
        mux = smkern.serve(
            decoder, pool, ladder=ladder, policy=policy, max_running=8, max_prefill=2,
            max_tokens=512, rungs=[None],
        )  # fmt: skip
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
        mux.close()
