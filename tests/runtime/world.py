"""A `Multiplexer` on a simulated GPU under watch, and what must hold of it after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from smkern.latency import Size
from smkern.models import ModelConfig, SamplingParams, preset
from smkern.runtime.handle import Handle, Output
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.request import Request
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from tests.runtime.watched import WatchedExecutor

RUNGS = (16, 48, 96)
END = 7
"""The model's end token."""


class Linear:
    """Prices by hand: tokens and keys over the SMs, and a start; side by side 1.25 times longer."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        share = size.layers / size.num_layers
        tokens = 2.0 * size.new_tokens * share
        rows = 4.0 * size.batch + 0.02 * size.total_kv
        return 5.0 + (tokens + rows) * 132 / num_sms

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 1.25


def small_config(**changes: Any) -> ModelConfig:
    """Four layers and few tokens to choose from."""
    given: dict[str, Any] = {
        "num_layers": 4, "vocab_size": 50, "max_position": 256, "eos_token_ids": (END,),
    }  # fmt: skip
    return preset("qwen3-8b").replace(**given | changes)


class World:
    """A runtime, its owner's view of every request, and the checks.

    Args:
        policy: Of the runtime.
        config: The simulated model.
        executor: Another executor, on a simulated device; what follows is then its own.
        truth: The tokens that each of its requests must give.
        num_pages, page_size, reuse, max_running, max_prefill, max_tokens, end_probability: Of the
            simulated executor.
        device: Options of the simulated device.
        shares: Whether the policy's sides may overlap, save beside mixed forwards.
        options: Of the `Multiplexer`.
    """

    def __init__(
        self,
        policy: Any = None,
        *,
        config: ModelConfig | None = None,
        executor: Any = None,
        truth: Callable[[Request], list[int]] | None = None,
        num_pages: int = 64,
        page_size: int = 4,
        reuse: bool | None = None,
        max_running: int = 6,
        max_prefill: int = 4,
        max_tokens: int = 48,
        end_probability: float = 0.03,
        device: dict[str, Any] | None = None,
        shares: bool = False,
        **options: Any,
    ) -> None:
        if executor is None:
            given: dict[str, Any] = {"decode_launch_us": 1.0, "prefill_launch_us": 1.5}
            executor = SimExecutor(
                small_config() if config is None else config,
                SimDevice(132, RUNGS, Linear(), **given | (device or {})),
                num_pages=num_pages,
                page_size=page_size,
                reuse=not options.get("batch_invariant", False) if reuse is None else reuse,
                max_running=max_running,
                max_prefill=max_prefill,
                max_tokens=max_tokens,
                end_probability=end_probability,
            )
        self.executor = executor
        self.device: SimDevice = executor.device
        self.truth = executor.completion if truth is None else truth
        self.watch = WatchedExecutor(
            self.executor,
            impatient=options.get("impatient", False),
            shares=lambda: shares or getattr(policy, "shares", False),
        )
        self.mux = Multiplexer(self.watch, policy=policy, **options)  # type: ignore[arg-type]
        self.handles: list[Handle] = []
        self.expected: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.outputs: list[tuple[float, Output]] = []
        self.steps = 0
        self.may_fail: set[int] | None = set()
        """Requests that may end with an error; None: any."""

    def submit(self, prompt: Sequence[int], max_new_tokens: int = 8, **options: Any) -> Handle:
        """Queue a request; options are the parameters', or `submit`'s."""
        own = {"priority", "deadline_ms", "arrival_us"}
        params = {k: v for k, v in options.items() if k not in own}
        handle = self.mux.submit(
            list(prompt),
            SamplingParams(max_new_tokens=max_new_tokens, **params),
            **{k: v for k, v in options.items() if k in own},
        )
        assert handle.id == len(self.handles)
        self.handles.append(handle)
        self.expected[handle.id] = self.truth(handle._request)
        self.tokens[handle.id] = []
        return handle

    def cancel(self, id_: int) -> None:
        """Want no more of a request."""
        self.mux.cancel(id_)
        self.ended.setdefault(id_, "cancelled")

    def step(self) -> list[Output]:
        """One step, with its outputs entered and everything checked."""
        self.steps += 1
        outputs = self.mux.step()
        for output in outputs:
            self._enter(output)
        self.check()
        return outputs

    def wait(self, us: float) -> None:
        """Time goes by."""
        self.device.spend(us)

    def turn(self, wait_us: float) -> None:
        """A step; where it gives nothing time goes by."""
        if not self.step():
            self.wait(wait_us)

    def until(
        self, happened: Callable[[], Any], wait_us: float = 5.0, most_steps: int = 20_000
    ) -> None:
        """Take turns until something has happened; a runtime that stands still is found."""
        for _ in range(most_steps):
            if happened():
                return
            self.turn(wait_us)
        raise AssertionError(f"it never happened: {self.handles}")

    def finish(self, most_steps: int = 20_000, wait_us: float = 40.0) -> None:
        """Take turns to the end, and check that nothing is left."""
        self.until(lambda: self.mux.is_idle, wait_us, most_steps)
        self.check_end()

    def run(self) -> None:
        """To the end by the runtime's own loop, which waits as it likes."""
        for output in self.mux.run():
            self._enter(output)
        self.check_end()

    def close(self) -> None:
        """Close the runtime: who has not ended is cancelled, and nothing is left."""
        self.mux.close()
        for handle in self.handles:
            self.ended.setdefault(handle.id, "cancelled")
        self.check_end()

    def check(self) -> None:
        """What must hold at any time."""
        assert not self.watch.violations, self.watch.violations[0]
        hazards = getattr(self.executor, "hazards", [])
        assert not hazards, hazards[0]
        self.executor.pool.check()
        for handle in self.handles:
            self._check_handle(handle)

    def check_end(self) -> None:
        """What must hold when nothing is left: all is delivered, every page is back."""
        for handle in self.handles:
            assert handle.done, handle
            assert handle.id in self.ended, f"{handle} ended without a word"
        while self.executor.pool.poll():
            self.wait(100.0)
        assert self.executor.pool.requests == ()
        assert self.executor.pool.usage.held == 0, self.executor.pool
        if self.executor.device.lost_by is None:  # what was on a lost device never ends
            assert self.watch.num_in_flight == 0
        self.check()

    def _enter(self, output: Output) -> None:
        self.outputs.append((self.device.now_us(), output))
        id_ = output.id
        assert id_ not in self.ended, f"{output} behind its end: {self.ended[id_]}"
        if output.error is not None:
            assert output.token is None
            assert self.may_fail is None or id_ in self.may_fail, output.error
            self.ended[id_] = "failed"
            return
        assert output.token is not None
        tokens = self.tokens[id_]
        at = len(tokens)
        assert at < len(self.expected[id_]), f"{output} behind the last token"
        assert output.token == self.expected[id_][at], f"{output} at {at} of {self.expected[id_]}"
        tokens.append(output.token)
        is_last = len(tokens) == len(self.expected[id_])
        assert (output.completion is not None) == is_last
        if output.completion is not None:
            assert list(output.completion.tokens) == tokens
            self.ended[id_] = output.completion.finish_reason

    def _check_handle(self, handle: Handle) -> None:
        tokens = list(handle.tokens)
        assert tokens == self.expected[handle.id][: len(tokens)], handle
        end = self.ended.get(handle.id)
        assert handle.done == (end is not None), f"{handle}: {end}"
        if end in ("stop", "length"):
            assert handle.completion is not None
            assert tokens == self.tokens[handle.id]
        if end == "failed":
            assert handle.error is not None


def random_world(
    policy: Callable[[], Any], draw: Random, seed: int, **options: Any
) -> tuple[World, list[list[int]]]:
    """A world whose pages run out, with options at random, and prompts that fit its pages.

    Args:
        policy: Makes the policy, between the draws of the pages and of the options.
        draw: What the world is like.
        seed: Seed of the prompts.
        options: More options of `World`.
    """
    page_size = draw.choice([1, 4, 16])
    num_pages = draw.choice([80, 120, 256]) // page_size
    world = World(
        policy(),
        preemption=draw.choice(["recompute", "keep"]),
        batch_invariant=draw.random() < 0.3,
        impatient=draw.random() < 0.2,
        num_pages=num_pages,
        page_size=page_size,
        **options,
    )
    return world, prompts(14, seed, longest=min(60, num_pages * page_size - 12))


def live(
    world: World, draw: Random, submit: Callable[[int], Any], count: int, cancels: float = 0.02
) -> None:
    """Requests come at random, and are cancelled as often as `cancels` says, until all have come.

    Args:
        world: Where.
        draw: What happens next.
        submit: Submits a request, by its number.
        count: Requests.
        cancels: Share of turns in which one of them is cancelled.
    """
    while len(world.handles) < count:
        chance = draw.random()
        if chance < 0.2:
            submit(len(world.handles))
        elif chance < 0.2 + cancels and world.handles:
            world.cancel(draw.choice(world.handles).id)
        elif chance < 0.6:
            world.wait(draw.choice([1, 10, 100, 1000]))
        world.step()


def prompts(count: int, seed: int = 0, longest: int = 60) -> list[list[int]]:
    """Random prompts, every third one beginning as another does."""
    draw = Random(seed)
    found: list[list[int]] = []
    for index in range(count):
        length = draw.randint(1, longest)
        text = [draw.randrange(50) for _ in range(length)]
        if index % 3 == 2:
            old = draw.choice(found)
            text = (old[: draw.randint(1, len(old))] + text)[:longest]
        found.append(text)
    return found
