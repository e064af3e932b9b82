"""A process with one vLLM: greedy tokens of some prompts and the log-probabilities beside them.

Its arguments are the model's folder, the file to write, and a JSON object: the prompts, and what
`vllm.LLM` takes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

NEW, BEST = 24, 64
"""Tokens drawn for a prompt, and how many of the best are told of each."""

COMPILED = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 256]}
"""As users start it: torch.compile; full graphs of decode steps, piecewise ones of all others."""
UNCOMPILED = COMPILED | {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def main(folder: str, out: str, given: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from smkern.integrations.vllm import register

    register()
    prompts = given.pop("prompts")
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        max_model_len=2048,
        max_num_batched_tokens=1024,
        max_num_seqs=32,
        max_logprobs=BEST,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.05,  # what must be free before it starts, no more
        seed=0,
        compilation_config=COMPILED if given.pop("compiled") else UNCOMPILED,
        **given,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=BEST
    )
    told = []
    for batch in prompts:
        requests = [{"prompt_token_ids": ids} for ids in batch]
        for request in llm.generate(requests, params, use_tqdm=False):
            (output,) = request.outputs
            best = [{str(k): x.logprob for k, x in step.items()} for step in output.logprobs]
            told.append({"tokens": list(output.token_ids), "logprobs": best})
    with open(out, "w") as file:
        json.dump(told, file)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
