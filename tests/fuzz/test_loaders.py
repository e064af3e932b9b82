"""Files that somebody spoiled: each is read as it is or refused by name, and what is read serves.

What a loader lets through is used once, as its readers use it: a value that only they trip over
was let through in error.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import pytest

from smkern.autotune import raw
from smkern.bench.results import load_results
from smkern.errors import SmkernError
from smkern.latency import Chunk, Size, TablePredictor
from smkern.latency.profile_file import read_profile
from smkern.latency.table import shipped_path
from smkern.models import ModelConfig
from smkern.policies import Decision
from smkern.profile import cache_file, load_profile, profile_for
from smkern.replay import load_trace
from smkern.runtime.place import Place
from smkern.runtime.timeline.command import summarize
from smkern.runtime.timeline.perfetto import to_json
from smkern.runtime.timeline.timeline import Timeline
from smkern.tuning import cells
from smkern.tuning.config import Budget, GemmProblem
from smkern.tuning.cost_constants import read_constants
from smkern.tuning.cost_model import predict_us
from smkern.tuning.families import FAMILIES
from smkern.tuning.select import select_gemm
from tests.fuzz.documents import spoiled
from tests.runtime.timeline.timelines import Script, waiting

H200 = load_profile("h200")
ROOT = Path(__file__).resolve().parents[2]
GPU = H200.info.name


@dataclass(frozen=True)
class Loader:
    """A kind of file.

    Args:
        name: Name of the file.
        lines: Its documents: one, or one a line.
        use: Reads a file, and uses what it read.
    """

    name: str
    lines: list[Any]
    use: Callable[[Path], object]


def some(path: Path, count: int = 12) -> list[Any]:
    """A shipped table with a few of its cells."""
    whole = json.loads(path.read_text())
    step = len(whole["cells"]) // count
    return [whole | {"cells": whole["cells"][::step]}]


def use_table(family: Any) -> Callable[[Path], object]:
    def use(path: Path) -> None:
        own = cells.user_path(GPU, family.name)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_bytes(path.read_bytes())
        file = family.file(own)
        file.dump(file.load(GPU))
        family.load(H200)

    return use


def use_profile(path: Path) -> None:
    own = cache_file(H200.info)
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_bytes(path.read_bytes())
    profile = profile_for(H200.info)
    for confined in ("mask", "grid"):
        assert 0 < profile.bandwidth(16, confined=confined) < float("inf")
    assert 0 < profile.flops(16) < float("inf")
    chosen = select_gemm(GemmProblem(64, 4096, 4096), Budget(32, "mask"), profile)
    assert 0 < chosen.predicted_us < float("inf")


def use_latency(path: Path) -> None:
    predictor = TablePredictor.read(path, H200)
    sizes = Size(batch=8, total_kv=8 * 1024, num_layers=36)
    assert 0 < predictor.alone_us(sizes, 32) < float("inf")
    assert isfinite(predictor.slowdown(sizes, 32, sizes, 100))


def use_constants(path: Path) -> None:
    constants = read_constants(path, "at all", "write them again")
    chosen = select_gemm(GemmProblem(64, 4096, 4096), Budget(32, "mask"), H200, constants=constants)
    found = predict_us(
        GemmProblem(64, 4096, 4096), chosen.config, Budget(32, "mask"), H200, constants
    )
    assert 0 < found < float("inf")


def use_timeline(path: Path) -> None:
    summarize(Timeline.load(path))


def use_results(path: Path) -> None:
    load_results(path).dump()


def use_config(path: Path) -> None:
    config = ModelConfig.from_hf(path)
    assert config.num_parameters > 0
    assert config.rope.inv_freq.shape[0] <= 128


def use_trace(path: Path) -> None:
    trace = load_trace(path)
    assert all(isfinite(request.at_s) for request in trace.requests)


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128,
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "rms_norm_eps": 1e-6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 512, "eos_token_id": [2, 3], "dtype": "bfloat16",
    "tie_word_embeddings": False, "rope_theta": 10000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64},
}  # fmt: skip
YARN = LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 64}}  # fmt: skip
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_scaling": None,
}  # fmt: skip
MOONCAKE = [
    {"timestamp": 1000 * n, "input_length": 600, "output_length": 5, "hash_ids": [7, n]}
    for n in range(4)
]


def documents() -> Iterator[Loader]:
    for family in FAMILIES:
        path = cells.shipped_path(GPU, family.name)
        if path.exists():
            yield Loader(path.name, some(path), use_table(family))
    yield Loader("profile.json", some_curves(), use_profile)
    yield Loader("latency.json", some(shipped_path("qwen3-8b", "h200"), 60), use_latency)
    constants = json.loads(cells.shipped_path(GPU, "cost_model").read_text())
    yield Loader("cost_model.json", [constants], use_constants)
    results = json.loads((ROOT / "bench/results/h200/runtime.json").read_text())
    yield Loader("results.json", [results | {"cells": results["cells"][:5]}], use_results)
    yield Loader("timeline.json", a_timeline(), use_timeline)
    lines = (ROOT / "bench/results/h200/qwen3-8b.profile.jsonl").read_text().splitlines()
    yield Loader("profile.jsonl", [json.loads(x) for x in (*lines[:3], *lines[-3:])],
                 lambda path: bool(read_profile(path).lines))  # fmt: skip
    with gzip.open(ROOT / "bench/results/h200/gemm-candidates.jsonl.gz", "rt") as file:
        measured = [json.loads(next(file)) for _ in range(4)]
    yield Loader("raw.jsonl", measured, lambda path: bool(raw.load(path)))
    yield Loader("mooncake.jsonl", MOONCAKE, use_trace)
    for name, config in (("llama", LLAMA), ("yarn", YARN), ("moe", MOE)):
        yield Loader(f"{name}.json", [config], use_config)


def a_timeline() -> list[Any]:
    script = Script()
    size = Size(chunks=(Chunk(64, 8),), layers=2, num_layers=4)
    script.ran(
        "prefill", 10.0, 40.0, size=size, about={"requests": [1]}, place=Place("prefill", 32, 100)
    )
    script.ran("decode", 15.0, 30.0, size=Size(batch=4, total_kv=64, num_layers=4))
    script.decided(
        41.0, Decision(rung=32, prefill=(100,), reason="prompt waits"), waiting=waiting(2)
    )
    script.ran("decode", 50.0, 60.0, place=Place("decode", 32, 32))
    return [to_json(script.timeline.trace())]


def some_curves() -> list[Any]:
    return [json.loads((ROOT / "smkern/profiles/h200.json").read_text())]


LOADERS = list(documents())


@pytest.mark.parametrize("loader", LOADERS, ids=lambda loader: loader.name)
def test_a_spoiled_file_is_read_or_refused_by_name(cases, tmp_path, monkeypatch, loader) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / loader.name
    lines = [json.dumps(line) for line in loader.lines]
    path.write_text("\n".join(lines) + "\n")
    loader.use(path)
    for random in cases(60):
        at = random.randrange(len(lines))
        changed = [*lines]
        changed[at] = spoiled(random, loader.lines[at])
        path.write_text("\n".join(changed) + "\n")
        with suppress(SmkernError):
            loader.use(path)
