"""A process with one SGLang: greedy tokens of some prompts and the log-probabilities beside them.

Its arguments are the model's folder, the file to write, and a JSON object: the prompts, how many
tokens follow each, and what else `sglang.Engine` takes.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.gpu.engines.vllm_child import BEST


def main(folder: str, out: str, given: dict[str, Any]) -> None:
    import sglang

    batches, new = given.pop("prompts"), given.pop("new")
    options = {
        "skip_tokenizer_init": True, "page_size": 16, "context_length": 4096,
        "max_total_tokens": 100_000, "max_running_requests": 64, "chunked_prefill_size": 1024,
        "dtype": "bfloat16", "random_seed": 0, "mem_fraction_static": 0.9,
        "grammar_backend": "none", "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 48, 64],
        "log_level": "info",
    }  # fmt: skip
    engine = sglang.Engine(model_path=folder, **options | given)
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new}
    texts = []
    for batch in batches:
        answers = engine.generate(
            input_ids=batch, sampling_params=params, return_logprob=True, top_logprobs_num=BEST
        )
        for answer in answers:
            about = answer["meta_info"]
            best = [{str(k): p for p, k, *_ in step} for step in about["output_top_logprobs"]]
            drawn = [int(token) for _, token, *_ in about["output_token_logprobs"]]
            texts.append({"tokens": drawn, "logprobs": best})
    with open(f"{out}.part", "w") as file:
        json.dump({"texts": texts}, file)
    os.replace(f"{out}.part", out)
    engine.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:3], json.loads(sys.argv[3]))
