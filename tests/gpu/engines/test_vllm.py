"""vLLM with smkern's attention against stock vLLM and a run of transformers in fp32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.gpu.engines.vllm_models import VOCAB, true_logprobs, write_model

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
CHILD = Path(__file__).with_name("vllm_child.py")
CHILDREN_S = float(os.environ.get("SMKERN_VLLM_CHILDREN_S", "300"))
OURS = {"attention_backend": "CUSTOM"}
LINEAR = OURS | {"quantization": "smkern"}
WORKER = LINEAR | {
    "worker_cls": "smkern.integrations.vllm.worker.Worker",
    "additional_config": {"smkern_decode_sms": 48},
}
COMPILED = ("ours", "ours-worker")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("qwen3", {}),
    "ours": ("qwen3", OURS),
    "ours-eager": ("qwen3", OURS | {"enforce_eager": True}),
    "ours-linear": ("qwen3", LINEAR),
    "ours-worker": ("qwen3", WORKER),
    "ours-fp8": ("qwen3", OURS | {"kv_cache_dtype": "fp8"}),
    "stock-gemma2": ("gemma2", {}),
    "ours-gemma2": ("gemma2", OURS),
}
PAIRS = pytest.mark.parametrize(
    ("ours", "stock"),
    [
        ("ours", "stock"),
        ("ours-eager", "stock"),
        ("ours-linear", "stock"),
        ("ours-worker", "stock"),
        ("ours-gemma2", "stock-gemma2"),
    ],
)
SLACK = 1.2
"""Error against fp32, over stock vLLM's own."""
FP8_ERROR = 0.5
"""Largest error of a logit where e4m3 rounds keys and values: 0.03 of each, logits of some 12."""


def prompts() -> list[list[list[int]]]:
    """Two batches: chunks and steps together; then prompts whose beginning is in the cache."""
    draw = Random(3)
    lengths = (1, 5, 16, 17, 100, 333, 512, 700, 1023, 1500, 1700, 64)
    first = [draw.choices(range(VOCAB), k=n) for n in lengths]
    return [first, [first[8][:600] + draw.choices(range(VOCAB), k=n) for n in (1, 40, 250)]]


@dataclass(frozen=True)
class Found:
    """What one engine drew, and how far its log-probabilities are from the truth."""

    tokens: list[list[int]]
    error: float
    largest: float
    behind: float
    """The most that a drawn token is truly behind the best one."""


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Found]:
    """The engines that the chosen tests ask for, beside each other, a process each."""
    base = tmp_path_factory.mktemp("vllm")
    items = [item for item in request.session.items if item.path == Path(__file__)]
    asked_for = {name for item in items for name in item.callspec.params.values()}
    cases = {name: case for name, case in CASES.items() if name in asked_for}
    kinds = {kind for kind, _ in cases.values()}
    truths = {kind: write_model(kind, base / kind) for kind in kinds}
    running = {}
    for name, (kind, options) in cases.items():
        given = json.dumps(options | {"prompts": prompts(), "compiled": name in COMPILED})
        command = [sys.executable, str(CHILD), str(base / kind), str(base / f"{name}.json"), given]
        with (base / f"{name}.log").open("w") as log:
            running[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    until = time.monotonic() + CHILDREN_S
    asked = [ids for batch in prompts() for ids in batch]
    results = {}
    for name, child in running.items():
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(until - time.monotonic(), 0.0))
        child.kill()
        if child.wait():
            print(f"--- {name}\n" + (base / f"{name}.log").read_text()[-6000:])
            continue
        told = json.loads((base / f"{name}.json").read_text())
        results[name] = judged(truths[CASES[name][0]], asked, told)
        print(name, results[name].error, results[name].largest, results[name].behind,
              len({t for text in results[name].tokens for t in text}))  # fmt: skip
    return results


def judged(model: Any, asked: list[list[int]], told: list[dict[str, Any]]) -> Found:
    """Compare every log-probability that was told with the truth behind the same tokens."""
    errors, behind = [], 0.0
    for prompt, one in zip(asked, told, strict=True):
        begin = len(errors)
        truth = true_logprobs(model, prompt, one["tokens"]).cpu()
        for row, token, best in zip(truth, one["tokens"], one["logprobs"], strict=True):
            ids = torch.tensor([int(x) for x in best])
            errors.append(torch.tensor([*best.values()]) - row[ids])
            behind = max(behind, float(row.max() - row[token]))
        print(f"{len(prompt)}:{torch.cat(errors[begin:]).square().mean().sqrt():.3f}", end=" ")
    all_errors = torch.cat(errors)
    return Found(
        [one["tokens"] for one in told],
        float(all_errors.square().mean().sqrt()),
        float(all_errors.abs().max()),
        behind,
    )


@PAIRS
def test_logits_are_as_near_to_fp32_as_stock_vllms(
    found: dict[str, Found], ours: str, stock: str
) -> None:
    assert found[ours].error <= SLACK * found[stock].error


@PAIRS
def test_greedy_tokens_are_the_best_but_for_rounding(
    found: dict[str, Found], ours: str, stock: str
) -> None:
    """And many: a model that repeats itself shows nothing."""
    assert found[ours].behind <= 2 * SLACK * found[stock].largest
    assert len({token for text in found[ours].tokens for token in text}) > 50


@pytest.mark.parametrize("name", ["ours-fp8"])
def test_an_fp8_cache_costs_what_e4m3_rounds(found: dict[str, Found], name: str) -> None:
    assert found[name].largest <= FP8_ERROR
