"""SGLang with smkern's attention against its own, and a run of transformers in fp32.

smkern has to be installed: SGLang's processes find its backend by the entry point.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engines.test_vllm import SLACK, Found, judged, prompts, run_engines
from tests.gpu.engines.vllm_models import true_model, write_config

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
KIND, NEW = "qwen3-8layers", 64
CHILDREN_S = float(os.environ.get("SMKERN_SGLANG_CHILDREN_S", "300"))
AT_ONCE = 6
"""Engines at a time: each takes some 10 GB, the truth in fp32 6."""
OURS = {"attention_backend": "smkern"}
PDMUX = OURS | {
    "enable_pdmux": True,
    "chunked_prefill_size": -1,
    "disable_overlap_schedule": True,
    "disable_prefill_cuda_graph": True,
    "max_prefill_tokens": 2048,
    "log_level": "debug",
}
"""Several batches of prompts, so that later ones run beside decode steps of those before."""
LAYERS_OF_A_STEP = 2
LIMITS = {"ours-multiplexed-within-5-ms": "5"}
"""Milliseconds between tokens."""
CASES: dict[str, dict[str, Any]] = {
    "stock": {"attention_backend": "fa3"},
    "ours": OURS,
    "ours-prompts-without-graphs": OURS | {"disable_prefill_cuda_graph": True},
    "ours-mixed": OURS | {"enable_mixed_chunk": True},
    "ours-multiplexed": PDMUX,
    "ours-multiplexed-within-5-ms": PDMUX,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """The engines beside each other, a process each, on weights that are read from a file."""
    from safetensors.torch import save_file

    folder, base = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("told")
    write_config(KIND, folder)
    model = true_model(KIND)
    weights = {name: x.detach().bfloat16().cpu() for name, x in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.cuda.empty_cache()
    results = {}
    for name, told in run_engines([*CASES], base, partial(start, folder), AT_ONCE, CHILDREN_S):
        results[name] = judged(model, told)
        if "enable_pdmux" in CASES[name]:
            log = (base / f"{name}.log").read_text()
            assert "partitions verified by %smid" in log
            assert re.search("Adjusting stream groups: [1-6],", log)
    return results


def start(folder: Path, name: str, base: Path) -> subprocess.Popen[bytes]:
    port = 30_000 + 2000 * [*CASES].index(name)
    given = CASES[name] | {"prompts": prompts(), "new": NEW, "port": port}
    env = dict(os.environ)
    if name in LIMITS:
        env["SMKERN_PDMUX_TBT_MS"] = LIMITS[name]
    if "enable_pdmux" in given:
        config = base / f"{name}.yaml"
        budget = LAYERS_OF_A_STEP * given["max_prefill_tokens"]
        config.write_text(f"sm_group_num: 8\nsplit_forward_token_budget: {budget}\n")
        given["pdmux_config_path"] = str(config)
    command = [sys.executable, "-m", "tests.gpu.engines.sglang_child", str(folder)]
    with (base / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*command, str(base / f"{name}.json"), json.dumps(given)], stdout=log,
            stderr=subprocess.STDOUT, env=env, start_new_session=True,
        )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name != "stock"])
def test_logits_and_tokens_are_as_near_to_fp32_as_stock_sglangs(found, name) -> None:
    """And many tokens: a model that repeats itself shows nothing."""
    ours, stock = found[name], found["stock"]
    print(f"{name}: rms error {ours.error:.4f}, stock {stock.error:.4f}; behind {ours.behind:.3f}")
    assert ours.error <= SLACK * stock.error
    assert ours.behind <= 2 * SLACK * stock.largest
    assert len({token for text in ours.tokens for token in text}) > 50
