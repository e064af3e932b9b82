"""A runtime served from first to last while a call of it goes wrong, and what must come of it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from smkern.errors import ArgumentError, EngineDeadError, SmkernError, StalledError
from smkern.models import SamplingParams
from smkern.policies import Chunked, Decision, Snapshot
from smkern.runtime.handle import Handle, Output
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from tests.models.generation import Letters
from tests.runtime.injected import Calls, Fault, Stand, stand_in, stand_of
from tests.runtime.policies import RandomPolicy
from tests.runtime.world import RUNGS, Linear, prompts, small_config

STEPS = 3000
CONTAINED = ("draw", "work", "event", "tokenizer", "policy", "predictor")
"""What fails its own requests, or nobody."""
ALSO_CONTAINED = {
    "executor.begin", "executor.prefill", "executor.decode", "executor.mixed", "executor.idle",
    "executor.prepare_next", "device.launch",
}  # fmt: skip


class Restless:
    """Random decisions, and now and then those of a policy that asks a predictor."""

    def __init__(self, seed: int, predictor: Any) -> None:
        self._random = RandomPolicy(seed, again=0.1)
        self._priced = Chunked(24, predictor=predictor, tbt_slo_ms=2.0)
        self._turn = 0

    def order(self, waiting: Any) -> float:
        return waiting.arrival_us

    def decide(self, snapshot: Snapshot) -> Decision:
        self._turn += 1
        return (self._priced if self._turn % 3 == 0 else self._random).decide(snapshot)


class Served:
    """One life of a runtime.

    Args:
        executor: Makes an executor on a device.
        device: What is behind the launches; `spend` moves its clock.
        truth: The tokens of a request.
        prompts: What is asked for.
        fault: What goes wrong.
        seed: Of the policy, and of who comes when.
    """

    def __init__(
        self,
        executor: Callable[[Any], Any],
        device: Any,
        truth: Callable[[Any], list[int]],
        prompts: list[list[int]],
        fault: Fault | None,
        seed: int,
    ) -> None:
        self.calls = calls = Calls(fault, device.spend)
        self.device = device
        stand = stand_in(device, calls)
        self.executor = executor(stand)
        policy: Any = Stand(Restless(seed, Stand(Linear(), "predictor", calls)), "policy", calls)
        self.mux = Multiplexer(
            stand_of(self.executor, stand, calls),
            policy=policy,
            tokenizer=Stand(Letters(), "tokenizer", calls),
            stall_timeout_s=0.5 if fault is not None and fault.kind == "hang" else 60.0,
            preemption=("recompute", "keep")[seed % 2],
        )
        self.handles: list[Handle] = []
        self.outputs: dict[int, list[Output]] = {}
        self.cancelled: set[int] = set()
        self._truth = truth
        self._prompts = prompts
        self._draw = Random(seed)
        self._was_interrupted = False

    def live(self) -> None:
        """Requests come, some are cancelled; to the end, whatever happens."""
        self.calls.is_armed = True
        with warnings.catch_warnings():  # of a policy that fails
            warnings.simplefilter("ignore", RuntimeWarning)
            self._live()

    def _live(self) -> None:
        try:
            self._serve()
        except KeyboardInterrupt:
            self._was_interrupted = True
        except EngineDeadError:
            assert self.mux.dead is not None
        except StalledError:
            assert self.fault is not None
            assert self.fault.kind in ("hang", "late"), self.fault
        self._end()

    @property
    def fault(self) -> Fault | None:
        return self.calls.fault

    def check(self) -> None:
        """Every request has ended once, by name; tokens are right; nothing is held."""
        for handle in self.handles:
            self._check_ends(handle)
        pool = self.executor.pool
        assert pool.requests == (), pool.requests
        self.device.spend(1e7)
        is_left = self._hangs_for_good
        assert is_left or (pool.poll() == 0 and pool.usage.held == 0), pool
        pool.check()
        if self.fault is not None and self.calls.has_failed and self._is_contained:
            assert self.mux.dead is None, self.mux.dead

    @property
    def _is_contained(self) -> bool:
        assert self.fault is not None
        site = self.fault.site
        named = site.split(".")[0] in CONTAINED or site in ALSO_CONTAINED
        return named and not self._was_interrupted

    @property
    def _hangs_for_good(self) -> bool:
        fault = self.fault
        return fault is not None and fault.kind == "hang" and fault.site == "event.query"

    def _serve(self) -> None:
        draw, prompts = self._draw, self._prompts
        for _ in range(STEPS):
            if len(self.handles) < len(prompts) and draw.random() < 0.3:
                self._submit(prompts[len(self.handles)])
            elif self.handles and draw.random() < 0.02:
                self._cancel(draw.choice(self.handles))
            if draw.random() < 0.3:
                self._read(self.mux.step())
            elif len(self.handles) == len(prompts) and draw.random() < 0.05:
                for output in self.mux.run():
                    self._read([output])
            elif draw.random() < 0.3:
                self.device.spend(draw.choice([1.0, 20.0, 300.0]))
            if len(self.handles) == len(prompts) and self.mux.is_idle:
                break
        else:
            raise AssertionError(f"no end after {STEPS} steps: {self.handles}")
        self._read(self.mux.step())  # with nothing to do
        self._go_on()

    def _submit(self, prompt: list[int]) -> None:
        index = len(self.handles)
        given: Any = prompt
        if index % 3 == 0:
            given = Letters().decode(prompt, skip_special_tokens=True)
        params = SamplingParams(
            3 + 2 * index, seed=index, stop=("zq",) if index % 4 == 1 else (), ignore_eos=True
        )
        later = self.device.now_us() + 100.0 if index % 5 == 4 else None
        try:
            handle = self.mux.submit(given, params, priority=index % 2, arrival_us=later)
        except (EngineDeadError, ArgumentError):
            raise
        except SmkernError:  # as a prompt's fault; it may be asked for again
            assert self.calls.has_failed
            return self._submit(prompt)
        self.handles.append(handle)
        self.outputs[handle.id] = []
        return None

    def _cancel(self, handle: Handle) -> None:
        if not handle.done:
            self.cancelled.add(handle.id)
        handle.cancel()

    def _read(self, outputs: list[Output]) -> None:
        for output in outputs:
            # A submit that was interrupted may have entered one that nobody has a handle of.
            self.outputs.setdefault(output.id, []).append(output)

    def _go_on(self) -> None:
        """A runtime that lives serves; one that is dead says so."""
        if self.mux.dead is None:
            self._submit(self._prompts[1])
            for output in self.mux.run():
                self._read([output])
            handle = self.handles[-1]
            assert handle.error is None or self.calls.has_failed
            assert handle.done
            return
        for call in (lambda: self.mux.submit([1]), self.mux.step):
            try:
                call()
            except EngineDeadError:
                continue
            raise AssertionError("a dead runtime goes on")

    def _end(self) -> None:
        """Closed at last, if not the first time."""
        if self._was_interrupted and self.mux.dead is None:  # in a wait, or a submit
            for output in self.mux.run():
                self._read([output])
        for _ in range(3):
            try:
                self.mux.close(force=self._hangs_for_good)
                return
            except KeyboardInterrupt:
                self._was_interrupted = True
            except (EngineDeadError, StalledError):
                assert self.calls.has_failed
        raise AssertionError("it does not close")

    def _check_ends(self, handle: Handle) -> None:
        request, error = handle._request, handle.error
        expected, got = self._truth(request), list(handle.tokens)
        outputs = self.outputs[handle.id]
        ends = [x for x in outputs if x.completion is not None or x.error is not None]
        assert handle.done, handle
        assert error is None or isinstance(error, SmkernError), error
        assert len(ends) <= 1, ends
        if ends:
            assert outputs[-1] is ends[0], "tokens behind the end"
            assert (ends[0].error, ends[0].completion) == (error, handle.completion)
        else:  # nobody was told: it was cancelled, by its owner or by close(), or all were stopped
            assert handle.cancelled or self.mux.dead is not None or self._was_interrupted, handle
            assert handle.cancelled or error is not None or handle.completion is not None, handle
        told = [x.token for x in outputs if x.token is not None]
        assert got[: len(told)] == told
        if not self._draws_otherwise:
            assert got == expected[: len(got)], (handle, got, expected)
        if handle.completion is not None:
            assert not handle.cancelled
            stopped = handle.completion.finish_reason == "stop"
            assert stopped or self._draws_otherwise or got == expected, (got, expected)
            assert got == list(handle.completion.tokens)
            assert told == got or not ends, "an end was told without its tokens"

    @property
    def _draws_otherwise(self) -> bool:
        """Whether a tokenizer answered with another prompt."""
        return self.fault is not None and self.fault.site == "tokenizer.encode"


def simulated(fault: Fault | None, seed: int = 8) -> Served:
    """A life on the simulated executor: pages run out, and two forwards fill a lane's queue."""
    device = SimDevice(132, RUNGS, Linear(), decode_launch_us=1.0, prefill_launch_us=1.5)
    executor = SimExecutor(
        small_config(num_layers=90), device, num_pages=30, page_size=4, max_running=4,
        max_prefill=3, max_tokens=32, graph_rows=0,
    )  # fmt: skip
    texts = [[token % 26 for token in text] for text in prompts(9, 4, longest=30)]
    return Served(lambda stand: executor, device, executor.completion, texts, fault, seed)


def recorded(serve: Callable[[Fault | None], Served]) -> Counter[str]:
    """How often each site is called where nothing fails."""
    served = serve(None)
    served.live()
    served.check()
    assert served.mux.dead is None
    assert all(handle.error is None for handle in served.handles)
    return served.calls.counts
