"""SGLang's stream groups as partitions: which there are, and which one is taken."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smkern.errors import ConfigError
from smkern.integrations.sglang import HOOKS, pdmux, register
from smkern.models.presets import preset
from smkern.partition import Partition
from tests.integrations.sglang import stubs
from tests.partition.conftest import INFO, Machine, fake_machine

ROWS, KEYS, PROMPT = 64, 2048, 4096
CONTEXT = "sglang.srt.multiplex.pdmux_context"
MIXIN = "sglang.srt.multiplex.multiplexing_mixin.SchedulerMultiplexMixin"
USUAL = [16, 24, 32, 40, 48, 64]


@pytest.fixture
def sgl() -> Iterator[SimpleNamespace]:
    with stubs.stubbed() as found:
        yield found


@pytest.fixture
def machine(sgl: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(pdmux, "device_info", lambda device: INFO)
    monkeypatch.setattr(Partition, "verify", lambda self: VERIFIED.append(self))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    VERIFIED.clear()
    with fake_machine() as made:
        yield made


VERIFIED: list[Partition] = []


class World:
    """A scheduler of SGLang, as far as its multiplexing is concerned, and the hooks around it."""

    def __init__(self, sgl: SimpleNamespace, patch: pytest.MonkeyPatch, **given: Any) -> None:
        self.config = sgl.PDMuxConfig(**given.pop("config", {}))
        # what SGLang read from its options
        args = {
            "tp_size": 1, "enable_dp_attention": False, "sm_group_num": 8,
            "get_attention_backends": lambda: ("smkern", "smkern"),
            "get_model_config": lambda: SimpleNamespace(hf_config=None),
        } | given  # fmt: skip
        context = sys.modules["sglang.srt.runtime_context"]
        patch.setattr(context, "get_server_args", lambda: SimpleNamespace(**args))
        patch.setattr(pdmux.ModelConfig, "from_hf", lambda source: preset("qwen3-8b"))
        self.sgl, self.hooks = sgl, pdmux.Multiplexing()
        self.others: list[Any] = []
        self.hooks.initialize(lambda *asked: self.others.append(asked), 0, self.config)
        self.module: Any = sys.modules[CONTEXT]
        self.planned: list[Any] = []
        backend = SimpleNamespace(init_forward_metadata=self.plan)
        self.taken: list[int] = []
        runner = SimpleNamespace(
            attn_backend=backend, update_decode_attn_backend=lambda index: self.taken.append(index)
        )
        self.scheduler = type("Scheduler", (sgl.SchedulerMultiplexMixin,), {})()
        self.scheduler.__dict__.update(
            tp_worker=SimpleNamespace(model_runner=runner), pdmux_config=self.config,
            stream_groups=self.module.STREAM_GROUPS, sm_counts=self.module.SM_COUNTS,
            real_sm_group_num=len(self.module.STREAM_GROUPS), split_prefill_batch=None,
            model_config=SimpleNamespace(num_hidden_layers=36),
        )  # fmt: skip

    def plan(self, batch: Any) -> None:
        self.planned.append((batch, torch.cuda.current_stream()))

    def adjust(self, rows: int, prompt: int = PROMPT, forward_batch: Any = None) -> int:
        """The group that is taken for so many decode rows beside a prompt."""
        self.scheduler.split_prefill_batch = prompts(prompt, forward_batch) if prompt else None
        original = self.sgl.SchedulerMultiplexMixin.adjust_stream_groups
        index, group = self.hooks.adjust(original, self.scheduler, decoding(rows))
        assert group is self.module.STREAM_GROUPS[index]
        assert self.module.CURRENT_STREAM_IDX == index == self.taken[-1]
        return index


def decoding(rows: int) -> SimpleNamespace:
    return SimpleNamespace(
        batch_size=lambda: rows, is_empty=lambda: not rows, seq_lens_cpu=torch.full((rows,), KEYS)
    )


def prompts(new: int, forward_batch: Any) -> SimpleNamespace:
    return SimpleNamespace(extend_lens=[new], prefix_lens=[0], split_forward_batch=forward_batch)


def test_groups_are_the_ladders(sgl, machine, monkeypatch) -> None:
    world = World(sgl, monkeypatch)
    assert world.hooks.ladder is not None
    counts = world.module.SM_COUNTS
    assert counts == [(132, 0), *((132 - n, n) for n in USUAL), (0, 132)]
    assert world.module.CURRENT_STREAM_IDX == 0
    for (prefill, decode), n in zip(world.module.STREAM_GROUPS[1:-1], USUAL, strict=True):
        split = world.hooks.ladder.split(decode=n)
        assert (prefill, decode) == (split.prefill.stream, split.decode.stream)
        assert split.decode.disjoint(split.prefill)
        assert split.decode.origin.atom == pdmux.ATOM
    assert len(VERIFIED) == 2 * len(USUAL)


@pytest.mark.parametrize(
    ("config", "sides"),
    [
        ({"sm_group_num": 3}, [16]),
        ({"sm_group_num": 5}, [16, 40, 64]),
        ({"sm_group_num": 40}, [16, 24, 32, 40, 48, 56, 64]),
        ({"manual_divisions": [[102, 30, 1], [60, 70, 8], [131, 1, 16]]}, [32, 72, 8]),
    ],
)
def test_divisions_are_those_of_the_config_as_the_device_has_them(sgl, config, sides) -> None:
    assert pdmux.decode_sides(INFO, sgl.PDMuxConfig(**config)) == sides


@pytest.mark.parametrize(
    ("division", "said"),
    [
        ([112, 32, 1], r"\[112, 32\] SMs .* this fake has 132"),
        ([132, 0, 1], "give each side one or more"),
        ([100, 32, 4], "batches of 4.*let one begin with 1"),
    ],
)
def test_divisions_that_cannot_be(sgl, division, said) -> None:
    config = sgl.PDMuxConfig(sm_group_num=3, manual_divisions=[division])
    with pytest.raises(ConfigError, match=said):
        pdmux.decode_sides(INFO, config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp_size": 2}, "--tp-size 2"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"sm_group_num": 7}, "start with --sm-group-num 8"),
    ],
)
def test_options_that_are_refused(sgl, machine, monkeypatch, given, said) -> None:
    with pytest.raises(ConfigError, match=said):
        World(sgl, monkeypatch, **given)


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan"])
def test_a_limit_that_is_none(sgl, machine, monkeypatch, text) -> None:
    monkeypatch.setenv(pdmux.LIMIT, text)
    with pytest.raises(ConfigError, match="give milliseconds above 0"):
        World(sgl, monkeypatch)


def test_a_limit_for_a_model_without_times(sgl, machine, monkeypatch) -> None:
    monkeypatch.setenv(pdmux.LIMIT, "20")

    def unknown(*given: Any, **named: Any) -> None:
        raise ConfigError("no such architecture")

    monkeypatch.setattr(pdmux, "predictor_for", unknown)
    with pytest.raises(ConfigError, match=r"no step times .*no such architecture.*unset it"):
        World(sgl, monkeypatch)


def test_another_backend_keeps_sglangs_groups(sgl, machine, monkeypatch) -> None:
    world = World(sgl, monkeypatch, get_attention_backends=lambda: ("smkern", "fa3"))
    assert world.others == [(0, world.config)]
    assert world.hooks.ladder is None
    asked = world.hooks.adjust(lambda *given: given, world.scheduler, "running")
    assert asked == (world.scheduler, "running")


@pytest.mark.parametrize(("name", "has"), [("smkern", True), ("fa3", False)])
def test_a_scheduler_gets_the_attributes_that_0_5_17_lost(name: str, has: bool) -> None:
    args = SimpleNamespace(get_attention_backends=lambda: (name, name))
    scheduler = SimpleNamespace(server_args=args, ps=SimpleNamespace(gpu_id=3, tp_size=1))
    pdmux.Multiplexing().complete(scheduler)
    assert hasattr(scheduler, "gpu_id") == hasattr(scheduler, "tp_size") == has
    pdmux.Multiplexing().complete(SimpleNamespace(server_args=args))


def test_without_a_limit_sglangs_table_chooses(sgl, machine, monkeypatch) -> None:
    world = World(sgl, monkeypatch)
    assert [world.adjust(rows) for rows in (1, 12, 18, 36, 200)] == [1, 2, 3, 6, 6]
    assert world.adjust(8, prompt=0) == 7
    assert world.adjust(0, prompt=0) == world.adjust(0) == 0


def test_prompts_on_their_way_are_planned_anew_for_their_sms(sgl, machine, monkeypatch) -> None:
    world = World(sgl, monkeypatch)
    world.adjust(8)
    assert not world.planned  # the batch's first layers make its plans
    world.adjust(0, forward_batch="batch")
    assert world.planned == [("batch", world.module.STREAM_GROUPS[0][0])]


@pytest.fixture
def limited(sgl, machine, monkeypatch) -> Any:
    """A world with a limit, ms; predicted as an H200 would take."""
    predict = pdmux.predictor_for
    monkeypatch.setattr(pdmux, "predictor_for", lambda model, sms: predict(model, "h200", sms=sms))

    def made(limit: float, **given: Any) -> World:
        monkeypatch.setenv(pdmux.LIMIT, str(limit))
        return World(sgl, monkeypatch, **given)

    return made


@pytest.mark.slow
def test_a_limit_takes_the_fewest_sms_that_keep_it(limited) -> None:
    taken = [limited(ms).adjust(ROWS) for ms in (1000, 30, 20, 15, 1)]
    assert taken == sorted(taken)
    assert taken[0] == 1, "the smallest"
    assert taken[-1] == len(USUAL), "none keeps it: the largest"
    assert len({*taken}) > 2
    world = limited(20)
    assert world.adjust(1) < world.adjust(ROWS)
    assert world.adjust(ROWS, prompt=0) == len(USUAL) + 1
    order = {"config": {"manual_divisions": [[68, 64, 1], [116, 16, 32]]}}
    assert limited(1000, **order).adjust(ROWS) == 2, "whatever their order"


def test_steps_that_take_longer_than_predicted_get_more_sms(limited, monkeypatch) -> None:
    world, clock = limited(20), [0.0]
    monkeypatch.setattr(pdmux, "perf_counter", lambda: clock[0])
    first = world.adjust(ROWS)

    def step(ms: float) -> None:
        clock[0] += ms / 1000
        world.hooks.begin_step(world.scheduler, 100, running_batch=decoding(ROWS))

    for _ in range(9):
        step(24)
    assert world.adjust(ROWS) > first
    world.scheduler.split_prefill_batch = None
    step(2000)  # nothing ran beside it
    assert world.hooks._pair is None


def test_streams_wait_for_what_they_read_of_each_other(sgl, machine, monkeypatch) -> None:
    world = World(sgl, monkeypatch)
    prefill, decode = world.module.STREAM_GROUPS[world.adjust(8)]
    world.hooks.begin_step(world.scheduler, 100, running_batch=decoding(8))
    assert (prefill.behind, decode.behind) == ([decode], []), "decode goes on beside layers"
    world.scheduler.split_prefill_batch = None  # its rows decode now
    world.hooks.begin_step(world.scheduler, 100, running_batch=decoding(8))
    assert (prefill.behind, decode.behind) == ([decode] * 2, [prefill])


def test_hooks_are_of_functions_that_sglang_has(sgl) -> None:
    for target, (method, _) in HOOKS.items():
        module, _, name = target.rpartition(".")
        theirs = inspect.signature(getattr(pkgutil.resolve_name(module), name)).parameters
        hook = getattr(pdmux.Multiplexing(), method)
        ours = [name for name in inspect.signature(hook).parameters if name != "original"]
        assert ours == [{"self": "scheduler"}.get(name, name) for name in theirs]


def test_hooks_are_registered_and_load_nothing_before_sglang_multiplexes(sgl, monkeypatch) -> None:
    found: dict[str, tuple[Any, Any]] = {}
    registry = SimpleNamespace(
        register=lambda target, hook, kind: found.update({target: (hook, kind)})
    )
    hooks = sys.modules["sglang.srt.plugins.hook_registry"]
    monkeypatch.setattr(hooks, "HookRegistry", registry)
    monkeypatch.delitem(sys.modules, pdmux.__name__)
    register()
    assert {target: kind.name for target, (_, kind) in found.items()} == {
        target: kind for target, (_, kind) in HOOKS.items()
    }
    assert pdmux.__name__ not in sys.modules
    begin, _ = found[f"{MIXIN}.init_pdmux"]
    ranks = SimpleNamespace(gpu_id=1, tp_size=1)
    backends = SimpleNamespace(get_attention_backends=lambda: ("smkern", "smkern"))
    scheduler = SimpleNamespace(ps=ranks, server_args=backends)
    begin(scheduler)
    assert (scheduler.gpu_id, scheduler.tp_size) == (1, 1)
