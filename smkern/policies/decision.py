"""What a policy answers: the next thing to do, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from smkern.policies.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do next; the `Multiplexer` checks it and carries it out.

    Attributes:
        rung: SMs of the decode side of a split, or None: aggregated, prompts' chunks and decode
            rows in one forward on the whole device.
        prefill: Ids of waiting requests that begin as a batch, where none runs or `preempt` is set;
            aggregated, without `layers`: those whose chunks join the next forward, the first served
            first. With `layers` they begin a batch whose layers take turns with decode steps on the
            whole device.
        chunk_tokens: New tokens of that batch or forward, at most; a prompt that does not fit is
            cut there. None: what the buffers hold.
        layers: Layers of the running batch to launch now, or of the one that begins; 0: none now.
            Of one that begins beside decode steps they wait until tokens that have come meanwhile
            are handed out, and the policy is asked again.
        steps: Decode steps to launch back to back, 1 to 64. Fewer where pages are short.
        join: "polled": a side goes on when its own work is over. "gang": both wait for each other
            at the end of what this decision launches.
        preempt: `prefill` runs before the running batch, which goes on afterwards; one level deep.
        pause_decode: No decode step now.
        prefill_rung: The rung whose prefill side the prompts' layers take, where that is another
            than `rung`'s: None, the whole device. "same": `rung`'s.
        shared: The two sides may overlap and run at once: with `rung=None` and `layers`, two
            streams without a partition; with `prefill_rung` below `rung`, or `rung=None`, prompts
            confined and decode around them. Without it, over several GPUs, and on a device whose
            lanes are one stream, sides that overlap take turns.
        ask_again_us: Ask again after so long, 1 us at least, also where nothing ends before (but
            not before a gang is over). Where nothing runs, nothing need be launched meanwhile: for
            100 ms at most while there is work, then a plain decision is carried out.
        reason: Why; shown by the timeline.
    """

    rung: int | None = None
    prefill: tuple[int, ...] = ()
    chunk_tokens: int | None = None
    layers: int = 0
    steps: int = 1
    join: Literal["polled", "gang"] = "polled"
    preempt: bool = False
    pause_decode: bool = False
    prefill_rung: int | Literal["same"] | None = "same"
    shared: bool = False
    ask_again_us: float | None = None
    reason: str = ""


class Policy(Protocol):
    """A function of a snapshot; it may keep notes of its own, and never waits.

    What it raises or answers in vain is replaced by a plain decision, kept in `Multiplexer.errors`
    and told once by a RuntimeWarning.

    A policy whose `decodes_alone_steadily` is true answers the same, whatever the moment, while
    requests decode, none waits and no prompt is computed: a simulation need not ask it then.

    A policy may have an attribute `order`, a name or a function of `smkern.policies.order`: how
    requests of one priority wait in `snapshot.waiting`. It may have a method
    `check_device(rungs, num_sms)`, called when a `Multiplexer` is made with it, that raises
    ArgumentError where it names rungs or limits that the device does not have. Its `predictor`, if
    it has one, is a `smkern.latency.Predictor`: timelines say what that expects of each launch.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next thing to do."""
        ...
