"""What a policy sees: the state of a `Multiplexer` as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from smkern.latency import Size

Trigger = Literal["arrival", "decode", "prefill", "idle", "timer"]
"""Why a policy is asked: a request came, a decode step ended, a group of prefill layers ended,
nothing runs and something waits, or the time that it named has come."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request whose prompt is not computed yet.

    Attributes:
        id: Its name in decisions.
        arrival_us: When it was submitted.
        tokens: Prompt tokens to compute, without those in the cache or computed in chunks; before
            it is admitted, as the cache was when it came among the first.
        cached: Tokens in front of them.
        priority: Higher goes first.
        deadline_us: When its first token is wanted; infinity where it was not said.
        pages: Pages that its admission takes, those of a prefix that others hold left out.
    """

    id: int
    arrival_us: float
    tokens: int
    cached: int = 0
    priority: int = 0
    deadline_us: float = float("inf")
    pages: int = 0


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A batch of prompts on its way through the layers.

    Attributes:
        ids: Its requests.
        chunks: (new tokens, cached tokens) of each.
        layers_launched: Layers launched so far.
        started_us: When its first layers were launched.
        priority: The highest of its requests.
        deadline_us: The earliest of its requests.
    """

    ids: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    layers_launched: int
    started_us: float
    priority: int = 0
    deadline_us: float = float("inf")


class Running(NamedTuple):
    """A request that decodes.

    Attributes:
        id: Its name.
        arrival_us: When it was submitted.
        prompt_tokens: Tokens of its prompt.
        tokens_out: Tokens delivered so far.
        first_token_us: When the first of them was delivered; 0 where none was.
        last_token_us: When the last was.
        priority: Higher goes first.
    """

    id: int
    arrival_us: float
    prompt_tokens: int
    tokens_out: int
    first_token_us: float
    last_token_us: float
    priority: int = 0


class Ended(NamedTuple):
    """A launch that was over since the policy was last asked.

    Attributes:
        lane: "decode" or "prefill".
        num_sms: SMs of its place.
        size: What it was made of.
        began_us, ended_us: When it ran, by the device's own times.
        seen_us: When the host saw it over, and handed out its tokens: first ones that come in the
            midst of a decode step with that step's.
        host_us: How long the host took to launch it.
    """

    lane: Literal["decode", "prefill"]
    num_sms: int
    size: Size
    began_us: float
    ended_us: float
    seen_us: float
    host_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A moment of a `Multiplexer`; one in which nothing goes on but what is given.

    Attributes:
        now_us: The clock.
        trigger: Why the policy is asked.
        waiting: Requests to be prefilled, the first to be served first (priority, then the
            policy's `order`, arrival where it has none); of a long queue the first 256.
        prefill: The batch whose layers run, if any.
        preempted: The batch that it preempted, if any.
        running_kv: Tokens of each decoding request.
        token_age_us: Time since the last delivered token of the request that waits longest; 0
            where nothing decodes.
        decode_queued: Decode steps launched and not over.
        prefill_queued: Groups of prefill layers launched and not over.
        rung: SMs of the decode side; None: both share the whole device.
        rungs: What a split may be.
        num_sms: SMs of the device.
        num_layers: Layers of the model.
        free_pages: Pages that can be had.
        page_size: Tokens of a page.
        max_running: Requests that may decode at a time.
        max_prefill: Requests of a prefill batch, at most.
        max_tokens: New tokens of a prefill batch or a mixed step, at most.
        joining: Requests whose prompts' last layers are on their way, and that decode behind these.
        more_waiting: Requests of the queue behind those of `waiting`.
        ready_rungs: Rungs, and None for the whole device, whose decode graphs exist; a step on
            another runs eagerly. None: all.
        running: The decoding requests, in the order of `running_kv`; made when it is looked at.
        ended: Launches that were over since the policy was last asked, in the order of their ends,
            of many the last 64; made when it is looked at.
    """

    now_us: float = 0.0
    trigger: Trigger = "arrival"
    waiting: tuple[Waiting, ...] = ()
    prefill: PrefillView | None = None
    preempted: PrefillView | None = None
    running_kv: tuple[int, ...] = ()
    token_age_us: float = 0.0
    decode_queued: int = 0
    prefill_queued: int = 0
    rung: int | None = None
    rungs: tuple[int, ...]
    num_sms: int
    num_layers: int
    free_pages: int
    page_size: int
    max_running: int
    max_prefill: int
    max_tokens: int
    joining: int = 0
    more_waiting: int = 0
    ready_rungs: tuple[int | None, ...] | None = None
    running: Sequence[Running] = ()
    ended: Sequence[Ended] = ()

    @property
    def batch(self) -> int:
        """Requests that decode."""
        return len(self.running_kv)
