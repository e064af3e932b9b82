"""A model's tokens through the Multiplexer: those of each prompt alone, whatever is decided.

The model runs on CPU tensors while it is launched; a simulated device says when it is over.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from smkern.models import Decoder, SamplingParams, Weights
from smkern.policies import Chunked, StaticSplit
from smkern.runtime.host_device import HostDevice
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.request import Request
from smkern.runtime.sim.device import SimDevice
from tests.models.generation import VOCAB, tiny
from tests.runtime.alone import Alone, pool_of
from tests.runtime.policies import RandomPolicy
from tests.runtime.world import RUNGS, Linear, World

pytestmark = pytest.mark.slow

CONFIG = tiny(num_layers=3)
SEED = 3


class Truth:
    """Each request alone, by the oracle; what was asked is remembered."""

    def __init__(self) -> None:
        self.weights = Weights.random(CONFIG, SEED)
        self._alone = Alone(Decoder(CONFIG, self.weights), CONFIG.max_position)
        self._known: dict[Any, list[int]] = {}

    def __call__(self, request: Request) -> list[int]:
        prompt = request.ids[: request.prompt_len]
        params = request.params
        asked = (tuple(prompt), params, request.seed)
        if asked not in self._known:
            seeded = SamplingParams(
                params.max_new_tokens, params.temperature, params.top_k, params.top_p,
                params.min_p, request.seed, stop_token_ids=params.stop_token_ids,
            )  # fmt: skip
            self._known[asked] = self._alone.generate(prompt, seeded)
        return self._known[asked]


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


def model_world(truth: Truth, policy: Any, **options: Any) -> World:
    """A world whose executor runs the model."""
    own = {"num_pages": 24, "page_size": 16, "max_running": 6, "max_prefill": 3, "max_tokens": 64}
    sizes = own | {name: options.pop(name) for name in own if name in options}
    same = options.get("batch_invariant", False)
    pool = pool_of(CONFIG, sizes.pop("num_pages"), sizes.pop("page_size"), reuse=not same)
    executor = ModelExecutor(
        Decoder(CONFIG, truth.weights, batch_invariant=same),
        pool,
        device=SimDevice(132, RUNGS, Linear(), decode_launch_us=1.0, prefill_launch_us=1.5),
        **sizes,
    )
    return World(policy, executor=executor, truth=truth, **options)


def workload(draw: Random, count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, some of which begin as another does, with ways to draw and to end.

    Most tests share a few workloads: what each request says alone takes longer than to serve it.
    """
    found: list[tuple[list[int], dict[str, Any]]] = []
    for index in range(count):
        text = [draw.randrange(VOCAB) for _ in range(draw.choice([1, 3, 9, 17, 30, 60]))]
        if found and draw.random() < 0.3:
            text = (draw.choice(found)[0] + text)[:70]
        params: dict[str, Any] = {"max_new_tokens": draw.randint(1, 12)}
        if draw.random() < 0.4:
            params |= {"temperature": 1.2, "top_p": 0.9, "top_k": 30, "seed": index}
        if draw.random() < 0.4:
            params |= {"stop_token_ids": tuple(draw.sample(range(VOCAB), 6))}
        if draw.random() < 0.2:
            params |= {"priority": draw.choice([-1, 1])}
        found.append((text, params))
    return found


def live(world: World, draw: Random, requests: list[tuple[list[int], dict[str, Any]]]) -> None:
    """Requests come at random, some are cancelled; to the end."""
    while len(world.handles) < len(requests):
        chance = draw.random()
        if chance < 0.25:
            prompt, params = requests[len(world.handles)]
            world.submit(prompt, **params)
        elif chance < 0.28 and world.handles:
            world.cancel(draw.choice(world.handles).id)
        elif chance < 0.6:
            world.wait(draw.choice([1, 20, 200, 2000]))
        world.step()
    world.finish()


POLICIES: dict[str, Any] = {
    "random": lambda seed: RandomPolicy(seed),
    "restless": lambda seed: RandomPolicy(seed, idle=0.4, preempt=0.8, stay=0.1),
    "chunks": lambda seed: Chunked(chunk_tokens=20, steps=1 + seed),
    "a split": lambda seed: StaticSplit(48, layers=1, steps=1 + seed, preempt_shorter_than=12),
    "a split that stays": lambda seed: StaticSplit(96, layers=2, steps=4, move=False, join="gang"),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_each_prompt_alone(truth: Truth, policy: str, seed: int) -> None:
    draw = Random(f"{policy} {seed}")
    world = model_world(
        truth,
        POLICIES[policy](seed),
        preemption=draw.choice(["recompute", "keep"]),
        batch_invariant=draw.random() < 0.4,
        impatient=False,
        num_pages=draw.choice([8, 12, 24]),
        max_running=draw.choice([2, 6]),
    )
    live(world, draw, workload(Random(seed), 10))
    assert sum(end in ("stop", "length") for end in world.ended.values()) > 5


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_every_look_ahead(truth: Truth, steps: int) -> None:
    """Ends inside a look-ahead are found on the device, and what is drawn behind them is not."""
    world = model_world(truth, StaticSplit(48, layers=2, steps=steps))
    for prompt, params in workload(Random(0), 8):
        world.submit(prompt, **params)
    world.finish()
    assert set(world.ended.values()) <= {"stop", "length"}


@pytest.mark.parametrize("policy", POLICIES)
def test_on_the_host_alone(truth: Truth, policy: str) -> None:
    """As anybody without a GPU runs it: work is over when it is launched."""
    pool = pool_of(CONFIG, 16)
    executor = ModelExecutor(
        Decoder(CONFIG, truth.weights), pool, device=HostDevice(rungs=RUNGS), max_running=4,
        max_prefill=3, max_tokens=48,
    )  # fmt: skip
    mux = Multiplexer(executor, policy=POLICIES[policy](1))
    wanted, handles = workload(Random(1), 6), []
    for prompt, params in wanted:
        priority = params.pop("priority", 0)
        handles.append(mux.submit(prompt, SamplingParams(**params), priority=priority))
    outputs = list(mux.run())
    for handle in handles:
        assert list(handle.tokens) == truth(handle._request)
        assert [x.token for x in outputs if x.id == handle.id] == list(handle.tokens)
    assert mux.is_idle
    mux.close()
    pool.check()
    assert pool.usage.held == 0


@pytest.mark.parametrize("seed", [10, 45, 76])
def test_launches_that_raise_leave_the_others_tokens_alone(truth: Truth, seed: int) -> None:
    """What was prepared for them is dropped, whatever it would have told the device."""
    draw = Random(seed)
    policy = draw.choice(sorted(POLICIES))
    world = model_world(
        truth,
        POLICIES[policy](seed % 6),
        preemption=draw.choice(["recompute", "keep"]),
        batch_invariant=draw.random() < 0.4,
        num_pages=draw.choice([8, 12, 24]),
        max_running=draw.choice([2, 6]),
    )
    for _ in range(3):
        world.device.fail_at(draw.randint(0, 120), "raise")
    world.may_fail = None
    live(world, draw, workload(draw, 9))


def test_the_model_says_different_things(truth: Truth) -> None:
    """Else equal tokens would say little."""
    world = model_world(truth, None)
    handles = [world.submit(prompt, 12) for prompt in ([1], [2], [3, 4], [5, 6, 7], [1, 2, 3])]
    world.finish()
    assert len({handle.tokens for handle in handles}) == len(handles)
    assert all(len(set(handle.tokens)) > 3 for handle in handles)
