"""What became of the requests of a replay: when each came and when its tokens were delivered."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smkern.replay.trace import Trace

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        at_s: When it came.
        prompt_tokens: Tokens of its prompt.
        new_tokens: Of these, what a cache of the pool's size lacks.
        output_tokens: Tokens that it should generate.
        limit_s: When its first token is wanted, from its arrival.
        token_s: When each of its tokens was delivered.
        error: Why it was refused or failed.
    """

    at_s: float
    prompt_tokens: int
    new_tokens: int
    output_tokens: int
    limit_s: float
    token_s: Sequence[float] = field(default_factory=lambda: array("d"))
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token; infinity where none came."""
        return self.token_s[0] - self.at_s if len(self.token_s) else inf

    @property
    def is_finished(self) -> bool:
        return len(self.token_s) >= self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between its tokens; None below two of them."""
        count = len(self.token_s)
        return (self.token_s[-1] - self.token_s[0]) / (count - 1) if count > 1 else None

    @property
    def misses(self) -> bool:
        """Whether its first token came late or never, or it failed later."""
        return self.error is not None or self.ttft_s > self.limit_s

    def gaps_s(self) -> Floats:
        """Times between its tokens, as delivered."""
        return np.diff(np.asarray(self.token_s, dtype=np.float64))


@dataclass(slots=True)
class Served:
    """A replay.

    Attributes:
        policy: Name of the policy, as tables show it.
        trace: What was replayed, at its rate.
        records: Its requests, in the order of their arrivals.
        warm_s: What was before counts for nothing.
        end_s: When the last request came: gaps behind it are not counted, for the load is gone.
        stopped: Why it was ended early; "": it was not.
        failed_decision: The policy's first error that is known, in whose place a plain decision was
            carried out; "": none.
        stats: Figures of the runtime: bubbles, FLOPs and bytes, switches; empty where not kept.
        split: (time, SMs of decode or None for whole) whenever it changed; empty where not kept.
        about: What else is known: clock, watts, settings.
    """

    policy: str
    trace: Trace
    records: list[Record]
    warm_s: float
    end_s: float
    stopped: str = ""
    failed_decision: str = ""
    stats: Any = None
    split: list[tuple[float, int | None]] = field(default_factory=list)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counted(self) -> list[Record]:
        """Those that came after the warm-up."""
        return [record for record in self.records if record.at_s >= self.warm_s]

    def gaps_s(self) -> Floats:
        """All gaps that ended between warm-up and the last arrival."""
        found = []
        for record in self.records:
            times = np.asarray(record.token_s, dtype=np.float64)
            if len(times) < 2:
                continue
            ends = times[1:]
            inside = (ends >= self.warm_s) & (ends <= self.end_s)
            found.append(np.diff(times)[inside])
        return np.concatenate(found) if found else np.empty(0)
