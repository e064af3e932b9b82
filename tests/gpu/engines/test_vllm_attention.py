"""vLLM's own classes around smkern's attention, over the lists of vLLM's tests of attention.

Its `tests/kernels/attention/test_flash_attn.py` and `test_triton_unified_attention.py` of 0.26 have
these heads, windows, caps, lengths, numbers of blocks, and tolerances. Its test of backends,
`tests/v1/attention/test_attention_backends.py`, runs itself where `SMKERN_VLLM_TESTS` names the
folder that holds its `tests` (vLLM's source distribution).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import smkern
from tests.integrations.vllm.worker import Worker

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

HEADS = ((4, 4), (8, 2), (5, 1))
LISTED, HEAD_DIMS = (128, 256), (64, 96, 128, 256)
"""vLLM's lists have the first; the others are what smkern serves, too."""
WINDOWS = (None, 64, 128, 256)
CAPS = (None, 50.0)
BLOCKS = (2048, 32_768)
LENGTHS = (((1, 1328), (5, 18), (129, 463)), ((1, 523), (1, 37), (1, 2011)))
"""New tokens of each request, and all of its keys."""
CONTEXT = 2048
KINDS = ((torch.bfloat16, "auto"), (torch.float16, "auto"), (torch.bfloat16, "fp8"))
BLOCK = (16, 32, 64, 128, 256)
DRAFTS = (2, 4, 8)
"""Tokens a request in steps that verify."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 128256, "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}  # fmt: skip
PHI = {
    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "hidden_size": 4096,
    "intermediate_size": 448, "num_attention_heads": 16, "num_key_value_heads": 4,
    "num_hidden_layers": 32, "vocab_size": 32064, "max_position_embeddings": 4096,
    "num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": 2047,
    "head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
CONFIGS = {
    "meta-llama/Meta-Llama-3-8B": LLAMA,
    "microsoft/Phi-tiny-MoE-instruct": PHI,
    "google/embeddinggemma-300m": PHI | {"sliding_window": 512},
}
"""What vLLM's test asks of models: the sizes of their heads and windows."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All that a test launches, side by side."""
    wide = [(heads, (KINDS[0],), 16, cap, False) for heads in HEADS for cap in CAPS]
    plain = [(HEADS[1], KINDS, block, None, sinks) for block in BLOCK for sinks in (False, True)]
    calls = [
        smkern.AttentionCalls(
            *heads, head_dim, block, max_q_len=CONTEXT, window=window, softcap=cap is not None,
            sinks=sinks, dtype=dtype, cache_dtype=torch.float8_e4m3fn if kind == "fp8" else None,
        )
        for heads, kinds, block, cap, sinks in (*wide, *plain)
        for (dtype, kind), head_dim, window in product(kinds, HEAD_DIMS, (None, 64))
    ]  # fmt: skip
    smkern.warmup(calls=calls, workers=os.cpu_count(), progress=False)


@pytest.fixture
def layout() -> str:
    return "NHD"


@pytest.fixture
def backend(layout: str) -> Iterator[Any]:
    from vllm.v1.attention.backends.utils import set_kv_cache_layout

    from smkern.integrations.vllm import backend as found

    set_kv_cache_layout(layout)
    yield found
    set_kv_cache_layout(None)


def served(backend: Any, lengths: Any, tolerance: float = 1.5e-2, **options: Any) -> Worker:
    """All but the new tokens as prompts, then a step of the new ones; both are right."""
    worker = Worker(
        backend, context=CONTEXT, requests=len(lengths), device="cuda",
        **{"dtype": torch.bfloat16, "blocks": BLOCKS[0]} | options,
    )  # fmt: skip
    before = {i: keys - new for i, (new, keys) in enumerate(lengths)}
    for step in (before, {i: new for i, (new, _) in enumerate(lengths)}):
        out, truth = worker.step(step)
        torch.testing.assert_close(out.float(), truth, atol=tolerance, rtol=1e-2)
    return worker


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("head_dim", LISTED)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_heads_windows_and_caps(backend, lengths, heads, head_dim, window, cap, blocks) -> None:
    served(
        backend, lengths, num_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, window=window,
        softcap=cap, blocks=blocks,
    )  # fmt: skip


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_dtypes_and_sinks(backend, lengths, kind, head_dim, window, has_sinks) -> None:
    sinks = torch.linspace(-2, 2, 8, device="cuda").bfloat16() if has_sinks else None
    served(
        backend, lengths, num_heads=8, kv_heads=2, head_dim=head_dim, window=window, sinks=sinks,
        dtype=kind[0], cache_dtype=kind[1],
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("block", BLOCK)
def test_blocks_and_layouts(backend, block, head_dim, kind, layout) -> None:
    served(
        backend, LENGTHS[0], num_heads=8, kv_heads=2, head_dim=head_dim, block=block,
        dtype=kind[0], cache_dtype=kind[1],
    )  # fmt: skip


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("head_dim", LISTED)
@pytest.mark.parametrize("heads", HEADS)
def test_drafts_are_verified_as_full_graphs_have_them(backend, heads, head_dim, draft) -> None:
    """A captured step of four requests, then three in its plans, a fourth of padding."""
    worker = Worker(
        backend, num_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, context=CONTEXT,
        blocks=BLOCKS[0], dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    worker.step({0: 1000, 1: 17, 2: 333, 3: 1})
    worker.step(dict.fromkeys(range(4), draft), capture=True)
    captured = worker.metadata.plans
    out, truth = worker.step(dict.fromkeys(range(3), draft), pad=1, rows=draft)
    assert {**worker.metadata.plans} == captured
    torch.testing.assert_close(out.float(), truth, atol=1.5e-2, rtol=1e-2)


def test_vllms_own_test_of_backends_through_ours(tmp_path: Path) -> None:
    """Its causal and windowed cases pass; encoders and what is not causal are refused by name."""
    theirs = os.environ.get("SMKERN_VLLM_TESTS")
    if theirs is None:
        pytest.skip("SMKERN_VLLM_TESTS does not name the folder that holds vLLM's tests")
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    here, root = Path(__file__).parent, Path(__file__).parents[3]
    report = tmp_path / "report.json"
    paths = (theirs, str(here), str(root), os.environ.get("PYTHONPATH", ""))
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "vllm_own", "-p", "no:cacheprovider",
        "--noconftest", "--rootdir", theirs,
        str(Path(theirs) / "tests/v1/attention/test_attention_backends.py"),
    ]  # fmt: skip
    more = {"PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1", "VLLM_OWN_OUT": str(report)}
    ran = subprocess.run(
        command, cwd=tmp_path, env=os.environ | more, capture_output=True, text=True, check=False
    )
    print(ran.stdout[-4000:], ran.stderr[-2000:])
    found = json.loads(report.read_text())
    print(json.dumps(found["counts"]))
    assert not found["failed"], found["failed"]
    assert found["counts"]["test_causal_backend_correctness passed"] == 30
    assert found["counts"]["test_sliding_window_backend_correctness passed"] == 18
