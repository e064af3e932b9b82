"""The attention backend against attention by hand, on CPU tensors and stubs of vLLM's classes."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import ConfigError
from smkern.integrations import vllm as ours
from tests.integrations.vllm import stubs
from tests.integrations.vllm.worker import Worker, config


@pytest.fixture(autouse=True)
def backend() -> Iterator[Any]:
    with stubs.stubbed():
        from smkern.integrations.vllm import backend as found

        yield found


def assert_close(found: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"num_heads": 8, "kv_heads": 1}, {"head_dim": 128}, {"window": 20}, {"softcap": 5.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16()}, {"cache_dtype": "fp8"},
    ],
    ids=str,
)  # fmt: skip
def test_chunks_and_steps_are_attention_by_hand(backend, options, layout, monkeypatch) -> None:
    monkeypatch.setattr(stubs, "LAYOUT", [layout])
    worker = Worker(backend, **options)
    for new in ({0: 37}, {0: 20, 1: 5}, {0: 1, 1: 1}, {1: 1, 0: 1, 2: 33}, {2: 1}):
        assert_close(worker.step(new))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("options", [{}, {"window": 20, "cache_dtype": "fp8"}], ids=str)
def test_since_0_29_caches_lie_as_vllm_likes(order, options) -> None:
    with stubs.stubbed("0.33.0"):
        found = import_module("smkern.integrations.vllm.backend")
        assert found.SmkernBackend.get_supported_kernel_block_sizes(SimpleNamespace())
        assert not found.SmkernBackend.supports_device_cpu_query_lens_mismatch()
        worker = Worker(found, order=order, **options)
        for new in ({0: 37}, {0: 20, 1: 5}, {1: 1, 0: 1, 2: 33}):
            assert_close(worker.step(new))
        assert_close(worker.step({0: 1, 1: 1}, capture=True))


def test_random_steps_with_rows_of_padding(backend: Any) -> None:
    random, worker = Random(3), Worker(backend, seed=3)
    lengths = dict.fromkeys(range(4), 0)
    for _ in range(25):
        some = random.sample(sorted(lengths), random.randint(1, 4))
        new = {x: random.choice([1, 1, 3, 20]) for x in some if lengths[x] < 200}
        if new:
            assert_close(worker.step(new, rows=random.choice([0, 0, 7])))
            for request, count in new.items():
                lengths[request] += count


@pytest.mark.parametrize("count", [1, 3])
def test_a_captured_steps_plan_is_made_anew_in_place(backend: Any, count: int) -> None:
    """What a graph of four requests keeps: the plan's addresses, also where some are padding."""
    worker = Worker(backend)
    assert_close(worker.step({0: 40, 1: 70, 2: 9, 3: 1}))
    assert_close(worker.step(dict.fromkeys(range(4), count), capture=True))
    captured = worker.metadata.plans
    assert_close(worker.step(dict.fromkeys(range(3), count), pad=1, rows=count))
    assert {**worker.metadata.plans} == captured  # the same objects
    assert_close(worker.step({0: count, 1: count}))
    assert worker.metadata.plans != captured


@pytest.mark.parametrize("options", [{}, {"block": 32, "cache_dtype": "fp8"}], ids=str)
@pytest.mark.parametrize("capture", [False, True])
def test_nothing_is_written_without_a_slot(backend: Any, options, capture: bool) -> None:
    """The blocks in a dummy step's table may be the prefix cache's by then, or another request's.

    A graph that was captured by such a step writes where a later one has slots.
    """
    worker = Worker(backend, **options)
    assert_close(worker.step({0: 40, 1: 70}))
    before = worker.cache.clone()
    captured = worker.dummy(2, capture=capture)
    assert torch.equal(worker.cache.view(torch.uint8), before.view(torch.uint8))
    assert_close(worker.step({0: 1, 1: 1}))
    for name in ("pages", "page_lens"):
        is_kept = getattr(worker.metadata, name) is getattr(captured, name)
        assert is_kept is capture


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sinks_follow_weights_that_are_loaded_anew(backend: Any, dtype: torch.dtype) -> None:
    """vLLM fills the parameter in place and calls again; graphs keep the address that is read."""
    given = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    impl = backend.SmkernImpl(4, 64, 0.125, 2, sinks=given)
    impl.process_weights_after_loading(torch.bfloat16)
    address = impl.sinks.data_ptr()
    given.data.fill_(3.0)
    impl.process_weights_after_loading(torch.bfloat16)
    assert impl.sinks.tolist() == [3.0] * 4
    assert (impl.sinks.dtype, impl.sinks.data_ptr()) == (torch.float32, address)


def test_a_run_that_counts_memory_gets_zeros(backend: Any) -> None:
    worker = Worker(backend)
    q = torch.ones(3, 4, 64)
    out = worker.impl.forward(worker.layer, q, q, q, worker.cache, None, torch.ones(3, 4, 64))
    assert not out.any()


def test_layers_of_other_windows_have_plans_of_their_own(backend: Any) -> None:
    given = (4, 64, 0.125, 2, None)
    impls = [backend.SmkernImpl(*given, window) for window in (None, 32, None)]
    layers = {f"layer{i}": SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
    builder = backend.SmkernMetadataBuilder(
        SimpleNamespace(block_size=16), [*layers], config(layers, 256), torch.device("cpu")
    )
    plans = builder.build(0, a_step()).plans
    assert [plans[impl.heads].shape.window for impl in impls] == [0, 32, 0]
    assert len(plans) == 2


def test_what_layers_of_equal_heads_differ_in_is_warmed_up(backend: Any, monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(smkern, "warmup", lambda **given: asked.extend(given["calls"]))
    kinds: list[dict[str, Any]] = [{}, {"logits_soft_cap": 5.0}, {"sinks": torch.zeros(4)}, {}]
    impls = [backend.SmkernImpl(4, 64, 0.125, 2, **kind) for kind in kinds]
    layers = {str(i): SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
    given = config(layers, 256)
    spec = SimpleNamespace(block_size=16)
    builder = backend.SmkernMetadataBuilder(spec, [*layers], given, torch.device("cpu"))
    builder._warm(impls, given)
    found = [(x.softcap, x.sinks) for x in asked if isinstance(x, smkern.AttentionCalls)]
    assert found == [(False, False), (True, False), (False, True)]
    assert len(asked) == len(found) + 1  # an append of one kind


def a_step(**more: Any) -> stubs.CommonAttentionMetadata:
    """A token each of two requests."""
    starts = torch.tensor([0, 1, 2]).int()
    return stubs.CommonAttentionMetadata(
        starts, starts, torch.tensor([5, 9]).int(), 2, 2, 1, 9, torch.zeros(2, 16).int(),
        torch.zeros(2).long(), **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"causal": False}, "attention that is not causal"),
        ({"causal": torch.tensor([True, False])}, "attention that is not causal"),
        ({"rswa_prefix_lens": torch.zeros(2)}, "a window with a prefix"),
        ({"mm_req_doc_ranges": {0: [(0, 4)]}}, "images' tokens seen from both sides"),
    ],
)
def test_a_step_that_would_be_computed_wrongly_is_refused(backend: Any, more, said) -> None:
    with pytest.raises(ConfigError, match=f"{said}.* attention_backend="):
        Worker(backend).builder.build(0, a_step(**more))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi slopes"), ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"head_size": 80}, "head_size=80"), ({"use_alibi_sqrt": True}, "use_alibi_sqrt=True"),
        ({"chunk_lookback": 2}, "chunk_lookback=2"),
    ],
)  # fmt: skip
def test_options_that_are_not_served_are_refused_when_a_layer_is_made(
    backend, options, said
) -> None:
    given: dict[str, Any] = {"num_heads": 4, "head_size": 64, "scale": 1.0, "num_kv_heads": 4}
    with pytest.raises(ConfigError, match=f"{said}.* attention_backend="):
        backend.SmkernImpl(**given | options)


def test_vllm_is_told_what_is_served(backend: Any) -> None:
    found = backend.SmkernBackend
    assert [n for n in (16, 24, 32, 48, 256) if found.supports_block_size(n)] == [16, 32, 48, 256]
    assert found.supports_head_size(128)
    assert not found.supports_head_size(80)
    assert found.supports_kv_cache_dtype("fp8")
    assert not found.supports_kv_cache_dtype("fp8_e5m2")
    assert found.supports_compute_capability(SimpleNamespace(major=8, minor=0))
    assert not found.supports_compute_capability(SimpleNamespace(major=7, minor=5))


def test_batch_invariance_is_that_of_the_gpus_kernel(backend: Any, monkeypatch) -> None:
    """With Triton's the longest query of a step decides bits, too."""
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(stubs.Platform, "CAPABILITY", capability)
        assert backend.SmkernBackend.supports_batch_invariance() is (capability == (9, 0))


@pytest.mark.parametrize(
    ("head_size", "use_mla", "use_sparse"),
    [(576, True, False), (128, False, True), (80, False, False)],
)
def test_a_model_that_is_not_served_is_refused_with_the_way_out(
    backend, head_size, use_mla, use_sparse
) -> None:
    """vLLM puts it beside its own reasons when it refuses to start."""
    asked = (torch.bfloat16, "auto", 16, use_mla, False, use_sparse, False, (9, 0))
    said = backend.SmkernBackend.supports_combination(head_size, *asked)
    assert said.endswith("leave attention_backend=CUSTOM out")
    served = (torch.bfloat16, "auto", 16, False, True, False, False, (9, 0))
    assert backend.SmkernBackend.supports_combination(128, *served) is None


@pytest.mark.parametrize(
    ("name", "other"), [("bfloat16", torch.float16), ("float16", torch.bfloat16)]
)
def test_a_cache_of_another_16_bit_dtype_is_refused_with_the_way_out(backend, name, other) -> None:
    """vLLM would start with it, and the first step would find keys of one dtype for the other's."""
    found, rest = backend.SmkernBackend, (16, False, False, False, False, (9, 0))
    assert found.supports_kv_cache_dtype(name)
    said = found.supports_combination(128, other, name, *rest)
    assert said.endswith("set kv_cache_dtype=auto")
    assert found.supports_combination(128, getattr(torch, name), name, *rest) is None
    assert found.supports_combination(128, other, "fp8", *rest) is None


def test_vllm_may_add_to_a_step_what_is_its_own(backend: Any) -> None:
    """Its layers of local chunks do so, around any backend's builder."""
    step = Worker(backend).builder.build(0, a_step())
    step.make_virtual_batches_block_table = str
    assert step.make_virtual_batches_block_table is str


def test_the_plug_in_registers_and_leaves_another_ones_name_alone() -> None:
    ours.register()
    assert stubs.REGISTERED == {stubs.Backends.CUSTOM: ours.BACKEND}
    stubs.REGISTERED[stubs.Backends.CUSTOM] = "theirs"
    ours.register()
    assert stubs.REGISTERED == {stubs.Backends.CUSTOM: "theirs"}


def test_a_vllm_without_the_registry_starts_and_its_log_says_so(caplog) -> None:
    del sys.modules["vllm.v1.attention.backends.registry"]
    ours.register()
    assert "smkern is not registered: it is written for vLLM 0.26" in caplog.text


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "0.260", "1.0"])
def test_another_vllm_is_refused_where_the_backend_is_asked_for(version: str) -> None:
    with stubs.stubbed(version):
        ours.register()
        with pytest.raises(ConfigError, match=f"vLLM {version}: .* 0.26"):
            __import__("smkern.integrations.vllm.backend")


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.30.0", "0.33.0", "0.33.1"])
def test_each_vllm_between_is_served(version: str) -> None:
    with stubs.stubbed(version):
        found = import_module("smkern.integrations.vllm.backend")
        assert_close(Worker(found, order=(0, 1, 2, 3)).step({0: 20, 1: 5}))


def test_nothing_of_vllm_is_imported_before_it_asks() -> None:
    assert ours.register.__module__ == "smkern.integrations.vllm"
    with stubs.stubbed():
        assert not set(stubs.OURS) & {*sys.modules}


def test_the_entry_point_is_the_register() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["smkern"].partition(":")
    assert getattr(import_module(module), name) is ours.register
