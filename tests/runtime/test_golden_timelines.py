"""The situations that the papers draw, as pictures of the simulated device.

MuxWise Figures 9 and 10, DRIFT Figures 7 and 8. A column is 2 ms; above decode, below prefill. "d"
is a decode step, "b" and "c" are layers of the second and third request's prompts; capitals run on
the whole device, "." is idle. A decode step takes 10 ms; a layer of the long prompt 10 ms beside
it.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from smkern.models import SamplingParams, preset
from smkern.policies.static_split import StaticSplit
from smkern.runtime.handle import Handle
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.sim.executor import SimExecutor
from tests.runtime.gantt import DrawnDevice

CONFIG = preset("qwen3-8b").replace(num_layers=8)
LONG, SHORT = 10_000, 500
LAYERS = CONFIG.num_layers
COLUMN_US = 2000.0


class Situation:
    """A decoding request, and prompts that come later, under a policy.

    Args:
        policy: What is asked of `StaticSplit`, on half of the SMs.
        arrivals: (milliseconds, prompt's tokens, tokens to draw) of each request.
        ends_at: The first request ends with this token, which nobody knows beforehand.
        device: Host times of launches.
    """

    def __init__(
        self,
        policy: dict,
        arrivals: list[tuple[float, int, int]],
        *,
        ends_at: int | None = None,
        **device: float,
    ) -> None:
        self.device = DrawnDevice(**device)
        self.executor = SimExecutor(
            CONFIG, self.device, num_pages=4000, page_size=16, max_tokens=16_384, max_context=32_768
        )
        mux = Multiplexer(
            self.executor, policy=StaticSplit(50, max_prefill_tokens=16_384, **policy)
        )
        self.handles: list[Handle] = []
        for number, (arrival_ms, prompt, new) in enumerate(arrivals):
            stops = (ends_at,) if ends_at is not None and number == 0 else ()
            params = SamplingParams(
                max_new_tokens=new, ignore_eos=True, seed=number, stop_token_ids=stops
            )
            self.handles.append(
                mux.submit([1 + number] * prompt, params, arrival_us=1e3 * arrival_ms)
            )
        self.tokens_ms: list[list[float]] = [[] for _ in arrivals]
        for output in mux.run():
            self.tokens_ms[output.id].append(self.device.now_us() / 1e3)
        mux.close()
        assert self.executor.hazards == []
        assert self.device.overlap_us == 0

    def picture(self, start_ms: float, columns: int) -> list[str]:
        lines = self.device.picture(COLUMN_US, 1e3 * start_ms)
        return [line[:columns] for line in lines]

    def idle_ms(self, lane: str, start_ms: float, end_ms: float) -> float:
        """How long a lane was idle within a span."""
        return end_ms - start_ms - self.device.busy_us(lane, 1e3 * start_ms, 1e3 * end_ms) / 1e3


def gaps_of(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(times)]


SLOW = {"prefill_launch_us": 6000.0, "decode_launch_us": 500.0}
"""A layer of prompts takes 6 ms to launch, all of them five decode steps; a graph half a
millisecond."""


@pytest.mark.parametrize(
    ("policy", "idle_ms", "picture"),
    [
        pytest.param(
            # All layers are launched at once: no decode step is launched meanwhile.
            {"layers": LAYERS, "steps": 1},
            (36, 80),
            [
                "DDDDDddddd...................ddddd.ddddddddddddddd",
                "........bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb..",
            ],
            id="phase by phase",
        ),
        pytest.param(
            # Layer by layer, but each side waits for the other.
            {"layers": 1, "steps": 1, "join": "gang"},
            (24, 80),
            [
                "DDDDDddddd...ddddd....ddddd...ddddd...ddddd...dddd",
                "........bbbbb...bbbbb....bbbbb...bbbbb...bbbbb...b",
            ],
            id="layers in gangs",
        ),
        pytest.param(
            # Polled: a graph's launch is all that is left between two decode steps, behind the
            # first two layers.
            {"layers": 1, "steps": 1},
            (0, 8),
            [
                "DDDDDdddddddddd..dddddddddddddddddddd.dddddddddddd",
                "........bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb..",
            ],
            id="layers, polled",
        ),
        pytest.param(
            # The next step is there when one ends; for who joins, at the prompt's end, it is not.
            {"layers": 1, "steps": 2},
            (0, 2),
            [
                "DDDDDDDDDddddddddddddddddddddddddddddddddddd..dddd",
                ".............bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb",
            ],
            id="layers, polled, looking ahead",
        ),
    ],
)
def test_a_prompt_whose_launch_is_slow_comes_beside_a_decoding_request(
    policy, idle_ms, picture
) -> None:
    situation = Situation(policy, [(0, 10, 14), (75, LONG, 2)], **SLOW)
    assert situation.picture(70, 50) == picture
    least_ms, most_ms = idle_ms
    assert least_ms <= situation.idle_ms("decode", 80, 160) < most_ms


@pytest.mark.parametrize(
    ("policy", "picture"),
    [
        pytest.param(
            {"layers": LAYERS, "steps": 1},
            [
                "DDDDDDDDDDDDDDDdddddddddd..............................DDDDD",
                "...............bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb.....",
            ],
            id="phase by phase",
        ),
        pytest.param(
            {"layers": 1, "steps": 1, "move": False},
            [
                "dddddddddd...........................ddddd",
                "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb.....",
            ],
            id="layers that stay on their side",
        ),
        pytest.param(
            # What is launched stays, the rest moves to the whole device.
            {"layers": 1, "steps": 1},
            [
                "DDDDDDDDDDDDDDDdddddddddd...............DDDDD",
                "...............bbbbbbbbbbBBBBBBBBBBBBBBB.....",
            ],
            id="layers that move",
        ),
    ],
)
def test_decode_ends_while_a_prompt_runs(policy, picture) -> None:
    arrivals = [(0, 10, 100), (25, LONG, 2)]
    ends_at = Situation(policy, arrivals[:1]).handles[0].tokens[5]
    situation = Situation(policy, arrivals, ends_at=ends_at)
    completion = situation.handles[0].completion
    assert completion is not None
    assert completion.finish_reason == "stop"
    start_ms = 30 if policy.get("move") is False else 0
    assert situation.picture(start_ms, 60) == picture


@pytest.mark.parametrize(
    ("preempt", "picture", "short_ms", "long_ms"),
    [
        pytest.param(
            None,
            [
                "DDDDDdddddddddddddddddddddddddddddddddddddddddddddDD",
                ".....bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbcc.....",
            ],
            100,
            90,
            id="in their order",
        ),
        pytest.param(
            1000,
            [
                "DDDDDdddddddddddddddddddddddddddddddddddddddddddddDD",
                ".....bbbbbbbbbbbbbbbccbbbbbbbbbbbbbbbbbbbbbbbbb.....",
            ],
            50,
            100,
            id="the short one first",
        ),
    ],
)
def test_a_short_request_comes_behind_a_long_one(preempt, picture, short_ms, long_ms) -> None:
    policy = {"layers": 1, "steps": 1, "preempt_shorter_than": preempt}
    situation = Situation(policy, [(0, 10, 20), (5, LONG, 2), (35, SHORT, 3)])
    assert situation.picture(0, 52) == [line[:52] for line in picture]
    first_ms = [times[0] for times in situation.tokens_ms]
    assert first_ms[1:] == pytest.approx([long_ms, short_ms], abs=0.2)
    # Decode notices nothing of either.
    assert max(gaps_of(situation.tokens_ms[0])) == pytest.approx(10, abs=0.2)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("arrival_ms", [5, 12, 13, 19])
def test_a_first_token_comes_with_the_step_before_its_second(steps, arrival_ms) -> None:
    """A prompt ends in the midst of a step, whose rows' tokens its first then comes with."""
    situation = Situation({"layers": LAYERS, "steps": steps}, [(0, 10, 20), (arrival_ms, SHORT, 6)])
    old, new = situation.tokens_ms
    assert new[0] in old
    assert max(gaps_of(new)) < 1.05 * max(gaps_of(old)[1:])


def test_a_first_token_by_which_a_request_ends_comes_at_once() -> None:
    situation = Situation({"layers": LAYERS, "steps": 1}, [(0, 10, 20), (5, SHORT, 1)])
    old, (ended,) = situation.tokens_ms
    assert ended not in old


def test_nobody_hears_of_a_request_that_is_cancelled_before_its_first_token() -> None:
    """Its prompt has ended; the token waits for a step."""
    for cancelled_ms in range(5, 40, 3):
        device = DrawnDevice()
        executor = SimExecutor(CONFIG, device, num_pages=4000, page_size=16)
        mux = Multiplexer(executor, policy=StaticSplit(50, layers=LAYERS))
        old = mux.submit([1] * 10, SamplingParams(max_new_tokens=12, ignore_eos=True))
        new = mux.submit(
            [2] * SHORT, SamplingParams(max_new_tokens=6, ignore_eos=True), arrival_us=5e3
        )
        found = []
        while device.now_us() < 1e3 * cancelled_ms:
            found += mux.step()
            mux.wait()
        before = [output.id for output in found].count(new.id)
        mux.cancel(new)
        rest = [output for output in mux.run() if output.id == new.id]
        assert all(output.token is None for output in rest)
        assert before <= len(new.tokens) <= before + 1
        assert len(old.tokens) == 12
        mux.close()
        assert executor.hazards == []
