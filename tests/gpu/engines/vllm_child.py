"""A process with one vLLM: greedy tokens of some prompts and the log-probabilities beside them.

Its arguments are a kind of model, the folder with its configuration, the file to write, and a JSON
object: the prompts, how many tokens follow each, and what `vllm.LLM` takes.
"""

from __future__ import annotations

import json
import os
import sys
from time import perf_counter
from typing import Any

BEST = 32
"""How many of the best tokens are told of each."""

COMPILED = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 256]}
"""As users start it: torch.compile; full graphs of decode steps, piecewise ones of all others."""
UNCOMPILED = COMPILED | {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def main(kind: str, folder: str, out: str, given: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    began = perf_counter()
    from vllm import LLM, SamplingParams

    from smkern.integrations.vllm import register
    from tests.gpu.engines.vllm_models import draw_fused

    register()
    batches, new = given.pop("prompts"), given.pop("new")
    load_format = given.pop("load_format")
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        load_format=load_format,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_batched_tokens=1024,
        max_num_seqs=64,
        max_logprobs=BEST,
        kv_cache_memory_bytes=given.pop("cache_gib") << 30,
        gpu_memory_utilization=0.05,  # what must be free before it starts, no more
        seed=0,
        compilation_config=COMPILED if given.pop("compiled") else UNCOMPILED,
        **given,
    )
    up_s = perf_counter() - began

    def fill(model: Any) -> None:
        for name, weight in model.named_parameters():
            draw_fused(kind, name, weight.data)

    if load_format == "dummy":
        llm.apply_model(fill)
    params = SamplingParams(
        temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=BEST
    )
    texts = []
    for batch in batches:
        requests = [{"prompt_token_ids": ids} for ids in batch]
        for request in llm.generate(requests, params, use_tqdm=False):
            (output,) = request.outputs
            best = [{str(k): x.logprob for k, x in step.items()} for step in output.logprobs]
            texts.append({"tokens": list(output.token_ids), "logprobs": best})
    with open(f"{out}.part", "w") as file:
        json.dump({"texts": texts, "up_s": up_s, "took_s": perf_counter() - began}, file)
    os.replace(f"{out}.part", out)


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
