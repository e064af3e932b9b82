"""What FlashInfer's wrappers are told, by a stand-in for its module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.peers import flashinfer_with, noted
from smkern.measure.attention import AttentionCase, AttentionOperands

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16}
MIXED = AttentionCase("mixed", "mixed", (1, 1, 21), (37, 5, 40), **HEADS)
DECODE = AttentionCase("decode", "decode", (1, 1), (37, 5), **HEADS)
FP8 = AttentionCase("fp8", "decode", (1, 1), (37, 5), "fp8", **HEADS)
PREFILL = AttentionCase("prefill", "prefill", (9, 21), (9, 40), **HEADS)


class FakeModule:
    """Records what wrappers are made, planned and run with."""

    def __init__(self) -> None:
        self.log: list[dict[str, Any]] = []
        module = self

        class Wrapper:
            kind = ""

            def __init__(self, workspace, layout, **options):
                self.made = {"kind": self.kind, "layout": layout, **options}

            def plan(self, *args, **options):
                self.planned = args, options

            def run(self, q, cache, *, out):
                shapes = {"q": tuple(q.shape), "k": tuple(cache[0].shape), "out": out}
                module.log.append({**self.made, "planned": self.planned, **shapes})

        class Decode(Wrapper):
            kind = "decode"

        class Prefill(Wrapper):
            kind = "prefill"

        def xqa(q, k, v, table, lens, out, partials, semaphores, heads, page_size, **options):
            shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "lens": lens, "out": out}
            module.log.append({**shapes, "sizes": (heads, page_size), **options})

        self.xqa = xqa
        self.BatchDecodeWithPagedKVCacheWrapper = Decode
        self.BatchPrefillWithPagedKVCacheWrapper = Prefill


def ways(case: AttentionCase, monkeypatch) -> tuple[FakeModule, dict, AttentionOperands]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    module, ops = FakeModule(), AttentionOperands(case, device="cpu")
    found = FlashInfer(module, torch.empty(0))
    return module, {(p, layout): make for p, layout, make in found.calls(ops)}, ops


@pytest.mark.parametrize(
    ("case", "providers"),
    [
        (DECODE, {"fa2", "fa3", "cuda-cores", "xqa"}),
        (FP8, {"fa2", "cuda-cores"}),
        (PREFILL, {"fa2", "fa3"}),
        (MIXED, {"fa2", "fa3", "fa2-one-launch"}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_every_way_has_both_layouts(case, providers, monkeypatch):
    _, found, _ = ways(case, monkeypatch)
    wanted = {(f"flashinfer:{p}", layout) for p in providers for layout in ("HND", "NHD")}
    assert set(found) == wanted


def test_decode_is_planned_with_the_pages_and_dtypes(monkeypatch):
    module, found, ops = ways(FP8, monkeypatch)
    out = found["flashinfer:fa2", "NHD"]()(0)
    (run,) = module.log
    assert out is ops.sets[0].out
    assert (run["use_tensor_cores"], run["backend"], run["layout"]) == (True, "fa2", "NHD")
    (indptr, indices, last, *sizes), options = run["planned"]
    assert indptr.tolist() == [0, 3, 4]
    assert last.tolist() == [5, 5]
    assert len(indices) == 4
    assert sizes == [4, 2, 16, 16]
    assert options == {"q_data_type": torch.bfloat16, "kv_data_type": torch.float8_e4m3fn}
    assert run["k"] == (4, 16, 2, 16)


def test_xqa_is_told_how_many_sms_the_stream_has(monkeypatch):
    module, found, ops = ways(DECODE, monkeypatch)
    monkeypatch.setattr("smkern.current_num_sms", lambda: 24)
    call = found["flashinfer:xqa", "HND"]()
    assert call(0) is ops.sets[0].out
    (run,) = module.log
    assert (run["sm_count"], run["kv_layout"], run["sizes"]) == (24, "HND", (2, 16))
    assert (run["q"], run["out"].shape) == ((2, 1, 4, 16), (2, 1, 4, 16))
    assert run["lens"].tolist() == [[37], [5]]
    assert run["out"].data_ptr() == ops.sets[0].out.data_ptr()


def test_a_mixed_step_is_a_prefill_and_then_a_decode(monkeypatch):
    module, found, ops = ways(MIXED, monkeypatch)
    found["flashinfer:fa3", "HND"]()(0)
    first, second = module.log
    assert (first["kind"], first["backend"], first["q"][0]) == ("prefill", "fa3", 21)
    assert (second["kind"], second["backend"], second["q"][0]) == ("decode", "fa2", 2)
    (starts, indptr, indices, last, *_), options = first["planned"]
    assert (starts.tolist(), indptr.tolist(), last.tolist()) == ([0, 21], [0, 3], [8])
    assert indices.tolist() == ops.pages.indices[4:7].tolist()
    assert options["causal"] is True
    assert first["out"].data_ptr() == ops.sets[0].out[2:].data_ptr()


def test_one_launch_takes_all_rows(monkeypatch):
    module, found, _ = ways(MIXED, monkeypatch)
    found["flashinfer:fa2-one-launch", "HND"]()(0)
    (run,) = module.log
    assert run["planned"][0][0].tolist() == [0, 1, 2, 23]
    assert run["q"][0] == 23


def test_a_wrapper_is_made_once_and_a_failure_is_kept(monkeypatch):
    module, found, _ = ways(DECODE, monkeypatch)
    make = found["flashinfer:cuda-cores", "HND"]
    assert make() is make()

    def broken(*args, **options):
        raise ValueError("cannot")

    module.BatchDecodeWithPagedKVCacheWrapper = broken
    make = found["flashinfer:fa2", "HND"]
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot"):
            make()


def test_absent_flashinfer_says_why_and_has_no_ways(monkeypatch, capsys):
    def without(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("smkern.bench.peers.import_module", without)
    meta = {}
    assert noted(flashinfer_with(), meta) is None
    assert "left out: ImportError: No module named 'flashinfer'" in capsys.readouterr().err
    assert meta == {"flashinfer": None}
    assert list(FlashInfer.of(None).calls(AttentionOperands(DECODE, device="cpu"))) == []
