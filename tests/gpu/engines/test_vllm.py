"""vLLM with smkern's attention against stock vLLM and a run of transformers in fp32."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.gpu.engines.vllm_models import (
    FP8,
    VOCAB,
    true_logprobs,
    true_model,
    write_checkpoint,
    write_config,
)

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
CHILDREN_S = float(os.environ.get("SMKERN_VLLM_CHILDREN_S", "300"))
JUDGED_S = float(os.environ.get("SMKERN_VLLM_JUDGED_S", "120"))
"""For how long texts of one engine are judged: those that are left are told, not judged."""
SIDE_BY_SIDE = 4
"""Engines at a time: with all of 8B's layers each takes 22 GB, the truth in fp32 33."""
OURS = {"attention_backend": "CUSTOM"}
LINEAR = OURS | {"quantization": "smkern"}
COMPILED = ("ours-compiled", "ours-blocks")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("qwen3", {}),
    "ours": ("qwen3", OURS),
    "ours-linear": ("qwen3", LINEAR),
    "stock-short": ("qwen3-short", {}),
    "ours-compiled": ("qwen3-short", LINEAR),
    "ours-eager": ("qwen3-short", OURS | {"enforce_eager": True}),
    "ours-fp8": ("qwen3-short", OURS | {"kv_cache_dtype": "fp8"}),
    "stock-blocks": ("qwen3-blocks", {}),
    "ours-blocks": ("qwen3-blocks", LINEAR),
    "stock-channels": ("qwen3-channels", {}),
    "ours-channels": ("qwen3-channels", LINEAR),
    "stock-gemma2": ("gemma2", {}),
    "ours-gemma2": ("gemma2", OURS),
}
PAIRS = pytest.mark.parametrize(
    ("ours", "stock"),
    [
        ("ours", "stock"),
        ("ours-linear", "stock"),
        ("ours-compiled", "stock-short"),
        ("ours-eager", "stock-short"),
        ("ours-blocks", "stock-blocks"),
        ("ours-channels", "stock-channels"),
        ("ours-gemma2", "stock-gemma2"),
    ],
)
SLACK = 1.2
"""Error against fp32, over stock vLLM's own."""
FP8_ERROR = 0.5
"""Largest error of a logit where e4m3 rounds keys and values: 0.03 of each, logits of some 12."""


def prompts() -> list[list[list[int]]]:
    """64 requests, chunks and steps together; then prompts whose beginning is in the cache."""
    draw = Random(3)
    lengths = [1, 5, 16, 17, 100, 333, 512, 700, 1023, 1500, 1700, 64]
    lengths += [draw.randrange(20, 200) for _ in range(64 - len(lengths))]
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
    """The engines that the chosen tests ask for, some beside each other, a process each."""
    base = tmp_path_factory.mktemp("vllm")
    items = [item for item in request.session.items if item.path == Path(__file__)]
    asked_for = {name for item in items for name in item.callspec.params.values()}
    names = [name for name in CASES if name in asked_for]
    truths: dict[str, Any] = {}
    results = {}
    began = time.monotonic()
    for name, told in run_engines(names, base, start, SIDE_BY_SIDE, CHILDREN_S):
        kind = CASES[name][0]
        if kind not in truths:
            truths.clear()
            torch.cuda.empty_cache()
            truths[kind] = true_model(kind)
        results[name] = judged(truths[kind], told)
        of = results[name]
        print(
            f"{name}: rms error {of.error:.4f}, largest {of.largest:.3f}, drawn token behind the "
            f"best {of.behind:.3f}, {len({t for x in of.tokens for t in x})} different tokens, "
            f"up after {told['up_s']:.0f} s of {told['took_s']:.0f}, judged at "
            f"{time.monotonic() - began:.0f}",
            flush=True,
        )
        for other in results:
            if CASES[other][0] == kind and other != name:
                print(f"  {same_tokens(results[other], of):.3f} of tokens as {other}", flush=True)
    return results


def run_engines(
    names: Sequence[str],
    base: Path,
    start: Callable[[str, Path], subprocess.Popen[bytes]],
    at_once: int,
    seconds: float,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each engine told, as they end; the log of one that failed is printed."""
    waiting, running = [*names], dict[str, subprocess.Popen[bytes]]()
    until = time.monotonic() + seconds
    while waiting or running:
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running[name] = start(name, base)
        ended = [name for name, child in running.items() if child.poll() is not None]
        if not ended and time.monotonic() > until:
            ended, waiting = [*running], []
        for name in ended:
            child = running.pop(name)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it left running
            if child.wait() == 0:
                yield name, json.loads((base / f"{name}.json").read_text())
            else:
                print(f"--- {name}\n" + (base / f"{name}.log").read_text()[-6000:], flush=True)
        time.sleep(0.2)


def start(name: str, base: Path) -> subprocess.Popen[bytes]:
    kind, options = CASES[name]
    if not (base / kind).exists():
        (write_checkpoint if kind in FP8 else write_config)(kind, base / kind)
    given = options | {
        "load_format": "auto" if kind in FP8 else "dummy",
        "prompts": prompts(), "new": 128 if kind == "qwen3" else 24,
        "compiled": name in COMPILED, "cache_gib": 4 if kind == "qwen3" else 1,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.gpu.engines.vllm_child", kind, str(base / kind)]
    with (base / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*command, str(base / f"{name}.json"), json.dumps(given)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def judged(model: Any, told: dict[str, Any]) -> Found:
    """Compare log-probabilities with the truth behind the same tokens, text by text."""
    errors, by_text, behind, texts = [], [], 0.0, told["texts"]
    asked = [ids for batch in prompts() for ids in batch]
    until = time.monotonic() + JUDGED_S
    for prompt, one in zip(asked, texts, strict=True):
        if time.monotonic() > until:
            break
        truth = true_logprobs(model, prompt, one["tokens"]).cpu()
        rows = [
            torch.tensor([*best.values()]) - row[torch.tensor([int(x) for x in best])]
            for row, best in zip(truth, one["logprobs"], strict=True)
        ]
        errors.append(torch.cat(rows))
        by_text.append((round(float(errors[-1].square().mean().sqrt()), 3), len(prompt)))
        drawn = truth.gather(1, torch.tensor(one["tokens"])[:, None])[:, 0]
        behind = max(behind, float((truth.max(1).values - drawn).max()))
    print(f"largest rms errors of {len(errors)} texts, by prompt: {sorted(by_text)[-4:]}")
    all_errors = torch.cat(errors)
    return Found(
        [one["tokens"] for one in texts],
        float(all_errors.square().mean().sqrt()),
        float(all_errors.abs().max()),
        behind,
    )


def same_tokens(one: Found, other: Found) -> float:
    """Share of tokens that are the same up to where two texts part."""
    alike = total = 0
    for a, b in zip(one.tokens, other.tokens, strict=True):
        parted = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        alike, total = alike + parted, total + len(a)
    return alike / total


@PAIRS
def test_logits_are_as_near_to_fp32_as_stock_vllms(found, ours, stock) -> None:
    assert found[ours].error <= SLACK * found[stock].error


@PAIRS
def test_greedy_tokens_are_the_best_but_for_rounding(found, ours, stock) -> None:
    """And many: a model that repeats itself shows nothing."""
    assert found[ours].behind <= 2 * SLACK * found[stock].largest
    assert len({token for text in found[ours].tokens for token in text}) > 50


@pytest.mark.parametrize("name", ["ours-fp8"])
def test_an_fp8_cache_costs_what_e4m3_rounds(found: dict[str, Found], name: str) -> None:
    assert found[name].largest <= FP8_ERROR
