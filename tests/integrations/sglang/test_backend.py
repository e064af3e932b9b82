"""SGLang's attention backend on CPU tensors, against attention written out by hand."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smkern
from smkern.errors import ConfigError
from smkern.integrations import sglang as ours
from tests.integrations.sglang import stubs
from tests.ops.attention.by_hand import attention_by_hand

HEADS, KV_HEADS, DIM, PAGE, CONTEXT, REQUESTS = 4, 2, 64, 16, 256, 6
SIZE = REQUESTS * CONTEXT


@pytest.fixture(autouse=True)
def sgl() -> Iterator[SimpleNamespace]:
    with stubs.stubbed() as found:
        yield found


class World:
    """SGLang around the backend: pools, layers, and what each request's keys should be."""

    def __init__(self, sgl: SimpleNamespace, **layer: Any) -> None:
        from smkern.integrations.sglang.backend import SmkernBackend

        self.sgl = sgl
        windows = (layer.pop("window", -1), -1)
        self.layers = [
            sgl.RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, i, sliding_window_size=w, **layer)
            for i, w in enumerate(windows)
        ]
        pool = sgl.MHATokenToKVPool(SIZE, PAGE, torch.float32, KV_HEADS, DIM, 2, "cpu", False)
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(float("nan"))
            buffer[:PAGE] = 0.0  # the page that padding reads
        self.requests = sgl.ReqToTokenPool(REQUESTS, CONTEXT, "cpu", False)
        self.runner = SimpleNamespace(
            model=nn.ModuleList(self.layers), page_size=PAGE, dtype=torch.float32,
            token_to_kv_pool=pool, req_to_token_pool=self.requests,
            model_config=SimpleNamespace(context_len=CONTEXT),
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
            server_args=SimpleNamespace(enable_pdmux=False),
        )  # fmt: skip
        self.backend = SmkernBackend(self.runner)
        self.draw = torch.Generator().manual_seed(2)
        pages = 1 + torch.randperm(SIZE // PAGE, generator=self.draw)
        slots = pages[:, None] * PAGE + torch.arange(PAGE)
        self.requests.req_to_token[1:] = slots.view(REQUESTS, CONTEXT).int()
        self.kept: dict[tuple[int, int], list[Tensor]] = {}

    def batch(self, mode: str, new: dict[int, int], pad: int = 0) -> SimpleNamespace:
        """New tokens by request, as SGLang describes a step; `pad` rows more."""
        old = [len(self.kept.get((0, r), [])) for r in new]
        lens = [was + count for was, count in zip(old, new.values(), strict=True)] + pad * [1]
        counts = [*new.values()]
        return SimpleNamespace(
            forward_mode=getattr(self.sgl.ForwardMode, mode), batch_size=len(lens),
            req_pool_indices=torch.tensor([*new, *pad * [0]]), seq_lens=torch.tensor(lens),
            seq_lens_cpu=torch.tensor(lens), extend_seq_lens=torch.tensor(counts).int(),
            extend_seq_lens_cpu=counts,
        )  # fmt: skip

    def step(
        self, batch: SimpleNamespace, new: dict[int, int], layers: Sequence[int] = (0, 1),
        backend: Any = None, **more: Any,
    ) -> None:  # fmt: skip
        """Run layers and compare; the rows behind are padding."""
        tokens = sum(new.values())
        rows = tokens + batch.batch_size - len(new)
        for index in layers:
            layer = self.layers[index]
            sizes = ((rows, HEADS * DIM), (rows, KV_HEADS, DIM), (rows, KV_HEADS, DIM))
            q, k, v = (torch.randn(size, generator=self.draw) for size in sizes)
            found = (backend or self.backend).forward(q, k, v, layer, batch, **more)
            assert found.shape == q.shape
            at, expected = 0, []
            for request, count in new.items():
                kept = self.kept.setdefault((index, request), [])
                for row in range(at, at + count):
                    kept.append(torch.stack([k[row], v[row]]))
                    expected.append(attend(q[row].view(HEADS, DIM), kept, layer, **more))
                at += count
            torch.testing.assert_close(found[:tokens], torch.stack(expected), rtol=1e-4, atol=1e-5)


def attend(q: Tensor, kept: list[Tensor], layer: Any, sinks: Tensor | None = None) -> Tensor:
    """One token's attention to all that came before it, and itself."""
    k, v = torch.stack(kept, 1)
    size = layer.sliding_window_size
    out, _ = attention_by_hand(
        q[None], [k], [v], [range(1)], scale=layer.scaling, softcap=layer.logit_cap, sinks=sinks,
        window=size + 1 if size > 0 else None,
    )  # fmt: skip
    return out.float().flatten()


STEPS = [
    ("EXTEND", {1: 20, 2: 5}), ("EXTEND", {3: 40}), ("EXTEND", {3: 9, 4: 1}),
    ("DECODE", {1: 1, 2: 1, 3: 1}), ("MIXED", {5: 17, 2: 1, 1: 1}), ("DECODE", {5: 1, 4: 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    "layer", [{}, {"window": 19}, {"logit_cap": 5.0}], ids=["causal", "window", "cap"]
)
def test_steps_are_attention(sgl: SimpleNamespace, layer: dict[str, Any]) -> None:
    """Chunks behind what is in the cache, decode rows, and both in one step."""
    world = World(sgl, **layer)
    for mode, new in STEPS:
        batch = world.batch(mode, new)
        world.backend.init_forward_metadata(batch)
        world.step(batch, new)


def test_sinks_take_their_share(sgl: SimpleNamespace) -> None:
    world = World(sgl)
    for mode, new in STEPS[:4]:
        batch = world.batch(mode, new)
        world.backend.init_forward_metadata(batch)
        world.step(batch, new, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))


def test_graphs_of_decode_rows_keep_their_plans_and_addresses(sgl: SimpleNamespace) -> None:
    """Rows of padding read a page of nobody's and leave other requests' keys as they are."""
    world = World(sgl)
    backend = world.backend
    for mode, new in STEPS[:2]:
        batch = world.batch(mode, new)
        backend.init_forward_metadata(batch)
        world.step(batch, new)
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    backend.init_forward_metadata_out_graph(world.batch("DECODE", {}, pad=4), in_capture=True)
    captured = backend.forward_metadata
    addresses = [x.data_ptr() for x in (captured.page_table, captured.kv_lens)]
    plans = [*captured.plans.values()]
    for new in ({1: 1, 3: 1}, {1: 1, 2: 1, 3: 1}, {2: 1}):
        batch = world.batch("DECODE", new, pad=4 - len(new))
        backend.init_forward_metadata_out_graph(batch)
        step = backend.forward_metadata
        assert [x.data_ptr() for x in (step.page_table, step.kv_lens)] == addresses
        assert all(x is y for x, y in zip(step.plans.values(), plans, strict=True))
        world.step(batch, new)


def test_a_size_that_is_captured_twice_has_plans_for_both_graphs(sgl: SimpleNamespace) -> None:
    """With and without LoRA's kernels, say: a replay does not say which graph it is of."""
    world = World(sgl)
    backend = world.backend
    batch = world.batch(*STEPS[0])
    backend.init_forward_metadata(batch)
    world.step(batch, STEPS[0][1])
    backend.init_cuda_graph_state(4, 4)
    captured = []
    for _ in range(2):
        backend.init_forward_metadata_out_graph(world.batch("DECODE", {}, pad=2), in_capture=True)
        captured.append(backend.forward_metadata)
    new = {1: 1, 2: 1}
    batch = world.batch("DECODE", new)
    backend.init_forward_metadata_out_graph(batch)
    for step in captured:
        assert step.plans == backend.forward_metadata.plans  # the same objects
    world.step(batch, new)


def test_a_prompt_by_layers_keeps_its_plans_while_others_decode(sgl: SimpleNamespace) -> None:
    """Under multiplexing: a backend for prompts, and another for decode steps between layers."""
    world, new, rows = World(sgl), {4: 50, 5: 7}, {1: 1, 2: 1}
    decode = type(world.backend)(world.runner)
    first = world.batch(*STEPS[0])
    world.backend.init_forward_metadata(first)
    world.step(first, STEPS[0][1])
    prompts = world.batch("SPLIT_PREFILL", new)
    world.backend.init_forward_metadata(prompts)
    for layer in (0, 1):
        world.step(prompts, new, layers=[layer])
        batch = world.batch("DECODE", rows)
        decode.init_forward_metadata(batch)
        world.step(batch, rows, backend=decode)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_what_layers_of_equal_heads_differ_in_is_warmed_up(sgl, monkeypatch, has_sinks) -> None:
    """Sinks come with the calls: of a model that has some, layers may go without."""
    backend, world, asked = importlib.import_module(stubs.OURS), World(sgl), []
    monkeypatch.setattr(backend.smkern, "warmup", lambda **given: asked.extend(given["calls"]))
    world.layers[1].logit_cap = 5.0
    if has_sinks:
        world.layers[0].sinks = nn.Parameter(torch.zeros(HEADS))
    world.runner.dtype = torch.bfloat16
    world.backend._warm(world.runner, world.layers)
    found = [(x.softcap, x.sinks) for x in asked if isinstance(x, smkern.AttentionCalls)]
    kinds = (False, True) if has_sinks else (False,)
    assert found == [(softcap, sinks) for softcap in (False, True) for sinks in kinds]
    assert len(asked) == len(found) + 1  # an append of one kind


def test_keys_that_another_layer_wrote_are_read(sgl: SimpleNamespace) -> None:
    world = World(sgl)
    batch = world.batch("EXTEND", {1: 7})
    world.backend.init_forward_metadata(batch)
    world.step(batch, {1: 7})
    q = torch.randn(7, HEADS * DIM, generator=world.draw)
    found = world.backend.forward(q, None, None, world.layers[0], batch, save_kv_cache=False)
    kept = world.kept[0, 1]
    expected = [attend(q[i].view(HEADS, DIM), kept[: i + 1], world.layers[0]) for i in range(7)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_prompts_are_not_captured(sgl: SimpleNamespace) -> None:
    world = World(sgl)
    with pytest.raises(ConfigError, match="--disable-prefill-cuda-graph"):
        world.backend.init_forward_metadata_out_graph(world.batch("EXTEND", {1: 4}), True)
    batch = world.batch("EXTEND", {1: 4})
    world.backend.init_forward_metadata_out_graph(batch)  # a graph's pieces without attention
    world.step(batch, {1: 4})


def test_an_idle_step_asks_for_nothing(sgl: SimpleNamespace) -> None:
    world = World(sgl)
    world.backend.init_forward_metadata(world.batch("IDLE", {}))
    assert world.backend.forward_metadata is None


def test_other_arguments_of_a_call_are_refused(sgl: SimpleNamespace) -> None:
    world = World(sgl)
    batch = world.batch("EXTEND", {1: 4})
    world.backend.init_forward_metadata(batch)
    with pytest.raises(ConfigError, match="q_rope of an attention call"):
        world.step(batch, {1: 4}, q_rope=torch.zeros(4))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"page_size": 1}, "page_size=1 is not served.* --page-size 16"),
        ({"dtype": torch.bfloat16}, r"cache of torch\.float32.*--kv-cache-dtype auto"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative"),
        ({"token_to_kv_pool": SimpleNamespace()}, "cache that is a SimpleNamespace"),
    ],
)
def test_options_that_are_not_served(sgl, change, said) -> None:
    from smkern.integrations.sglang.backend import check_runner

    runner = World(sgl).runner
    check_runner(runner)
    with pytest.raises(ConfigError, match=said):
        check_runner(SimpleNamespace(**{**vars(runner), **change}))


def test_a_model_that_runs_no_prompts_by_layers_is_not_multiplexed(sgl: SimpleNamespace) -> None:
    from smkern.integrations.sglang.backend import check_runner

    runner = World(sgl).runner
    runner.server_args.enable_pdmux = True
    with pytest.raises(ConfigError, match="--enable-pdmux with ModuleList"):
        check_runner(runner)
    runner.model.forward_split_prefill = lambda *given: None
    check_runner(runner)


def test_a_cache_in_parts_is_refused(sgl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = importlib.import_module(stubs.OURS)
    monkeypatch.setattr(backend, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=2))
    with pytest.raises(ConfigError, match="--dcp-size 1"):
        World(sgl)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ({"v_head_dim": 128}, "values of another size"),
        ({"is_cross_attention": True}, "layer 0: attn_type"),
        ({"logit_cap": 3.0, "logit_capping_method": "sigmoid"}, "capped by sigmoid"),
    ],
)
def test_layers_that_are_not_served(sgl: SimpleNamespace, layer: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        World(sgl, **layer)


def test_the_plug_in_is_the_backend_of_its_name(sgl: SimpleNamespace) -> None:
    ours.register()
    made = sgl.ATTENTION_BACKENDS["smkern"](World(sgl).runner)
    assert type(made).__name__ == "SmkernBackend"


def test_an_sglang_without_registries_starts_without_smkern(caplog) -> None:
    with stubs.stubbed(server_args={"add_attention_backend_choices": None}) as found:
        import sys

        del sys.modules["sglang.srt.server_args"].add_attention_backend_choices  # type: ignore[attr-defined]
        found.ATTENTION_BACKENDS.pop("smkern", None)
        ours.register()
        assert "smkern" not in found.ATTENTION_BACKENDS
    assert "not registered" in caplog.text


def test_an_sglang_of_another_interface_is_refused() -> None:
    class Older:
        pass

    with (
        stubs.stubbed(base_attn_backend={"AttentionBackend": Older}),
        pytest.raises(ConfigError, match=r"SGLang 0\.5\.23: .* 0\.5\.17 and later"),
    ):
        import smkern.integrations.sglang.backend  # noqa: F401
