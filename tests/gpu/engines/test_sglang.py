"""SGLang with smkern's attention against its own, and a run of transformers in fp32.

smkern has to be installed: SGLang's processes find its backend by the entry point.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.engines.test_vllm import SLACK, Found, judged, prompts
from tests.gpu.engines.vllm_models import true_model, write_config

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed")
KIND, NEW = "qwen3-8layers", 64
CHILD_S = float(os.environ.get("SMKERN_SGLANG_CHILD_S", "200"))
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
    """The engines one after another, a process each, on weights that are read from a file."""
    from safetensors.torch import save_file

    folder, base = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("told")
    write_config(KIND, folder)
    model = true_model(KIND)
    weights = {name: x.detach().bfloat16().cpu() for name, x in model.named_parameters()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    torch.cuda.empty_cache()
    results = {}
    for name, options in CASES.items():
        told = run_engine(name, options, folder, base)
        if told is not None:
            results[name] = judged(model, told)
            if "enable_pdmux" in options:
                assert "partitions verified by %smid" in told["log"]
                assert re.search("Adjusting stream groups: [1-6],", told["log"])
    return results


def run_engine(name: str, options: dict[str, Any], folder: Path, base: Path) -> Any:
    """What an engine told; None where its process failed, whose log is printed then."""
    given = options | {"prompts": prompts(), "new": NEW}
    out, log = base / f"{name}.json", base / f"{name}.log"
    command = [sys.executable, "-m", "tests.gpu.engines.sglang_child", str(folder), str(out)]
    env = dict(os.environ)
    if name in LIMITS:
        env["SMKERN_PDMUX_TBT_MS"] = LIMITS[name]
    if "enable_pdmux" in options:
        config = base / "pdmux.yaml"
        budget = LAYERS_OF_A_STEP * options["max_prefill_tokens"]
        config.write_text(f"sm_group_num: 8\nsplit_forward_token_budget: {budget}\n")
        given["pdmux_config_path"] = str(config)
    with log.open("w") as file:
        child = subprocess.Popen(
            [*command, json.dumps(given)], stdout=file, stderr=file, env=env,
            start_new_session=True,
        )  # fmt: skip
        try:
            child.wait(CHILD_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)  # its children, too
    if out.exists():
        return json.loads(out.read_text()) | {"log": log.read_text()}
    print(f"--- {name}\n{log.read_text()[-6000:]}", flush=True)
    return None


@pytest.mark.parametrize("name", [name for name in CASES if name != "stock"])
def test_logits_and_tokens_are_as_near_to_fp32_as_stock_sglangs(found, name) -> None:
    """And many tokens: a model that repeats itself shows nothing."""
    ours, stock = found[name], found["stock"]
    print(f"{name}: rms error {ours.error:.4f}, stock {stock.error:.4f}; behind {ours.behind:.3f}")
    assert ours.error <= SLACK * stock.error
    assert ours.behind <= 2 * SLACK * stock.largest
    assert len({token for text in ours.tokens for token in text}) > 50
