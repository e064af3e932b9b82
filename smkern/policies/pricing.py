"""What a policy's candidates would take, by its predictor."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from smkern.latency import Chunk, Size
from smkern.latency.predictor import Predictor
from smkern.policies.snapshot import Snapshot

Chunks = tuple[tuple[int, int], ...]
"""(new tokens, cached tokens) of each prompt."""


class Prices:
    """Times of launches at one moment, each predicted once: a prediction takes 2 to 70 us.

    Args:
        predictor: How long a launch takes.
        snapshot: The moment.

    Attributes:
        step: The next decode step, with those who join before it: whose last layers are on their
            way, with as many keys as the others have on average. A split that just fits those who
            decode now is late with the first step after each join: on Azure's conversations at
            20 ms, simulated, MuxWise serves 16.0 requests/s without them, 22.3 with.

    Example:
        >>> from smkern.latency import TablePredictor
        >>> from smkern.policies import Snapshot
        >>> snapshot = Snapshot(
        ...     trigger="decode", running_kv=(2048,) * 64, rungs=(16, 32), num_sms=132,
        ...     num_layers=36, free_pages=500, page_size=16, max_running=64, max_prefill=4,
        ...     max_tokens=8192,
        ... )
        >>> prices = Prices(TablePredictor.load("qwen3-8b"), snapshot)
        >>> prompt = ((1000, 0),)
        >>> prices.step_us(32) <= prices.step_beside_us(32, prompt, 100)
        True
        >>> prices.step_us(132) < prices.mixed_us(prompt)
        True
    """

    __slots__ = ("_alone", "_predictor", "_sizes", "_snapshot", "step")

    def __init__(self, predictor: Predictor, snapshot: Snapshot) -> None:
        layers, rows, keys = snapshot.num_layers, snapshot.batch, sum(snapshot.running_kv)
        if rows:
            keys += snapshot.joining * keys // rows
            rows += snapshot.joining
        self.step = Size((), layers, layers, False, rows, keys)
        self._predictor = predictor
        self._snapshot = snapshot
        self._sizes: dict[Chunks, Size] = {}
        self._alone: dict[tuple[Size, int], float] = {}

    def step_us(self, num_sms: int) -> float:
        """A decode step with nothing beside it; 0 where nothing decodes."""
        return self._alone_us(self.step, num_sms) if self.step.batch else 0.0

    def grown_step_us(self, rows: int, keys: int, num_sms: int) -> float:
        """A decode step of so many more rows and keys, with nothing beside it."""
        layers, step = self._snapshot.num_layers, self.step
        size = Size((), layers, layers, False, step.batch + rows, step.total_kv + keys)
        return self._predictor.alone_us(size, num_sms)

    def prompts_us(self, chunks: Iterable[tuple[int, int]], num_sms: int) -> float:
        """All layers of a batch of prompts with nothing beside them."""
        return self._alone_us(self._prompts(chunks), num_sms)

    def step_beside_us(
        self, num_sms: int, chunks: Iterable[tuple[int, int]], prefill_sms: int
    ) -> float:
        """A decode step while layers of prompts run on other SMs all the time."""
        if not self.step.batch:
            return 0.0
        prompts = self._prompts(chunks)
        return self.step_us(num_sms) * self._predictor.slowdown(
            self.step, num_sms, prompts, prefill_sms
        )

    def worst_step_us(
        self, num_sms: int, chunks: Iterable[tuple[int, int]], prefill_sms: int
    ) -> float:
        """The longest that a decode step may take beside prompts: the predictor's own guard
        (`worst_us`) where it has one, else what it expects."""
        worst = getattr(self._predictor, "worst_us", None)
        if worst is None or not self.step.batch:
            return self.step_beside_us(num_sms, chunks, prefill_sms)
        return float(worst(self.step, num_sms, self._prompts(chunks), prefill_sms))

    def prompts_beside_us(
        self, chunks: Iterable[tuple[int, int]], num_sms: int, decode_sms: int
    ) -> float:
        """All layers of a batch of prompts while decode steps run on other SMs all the time; on 0:
        while none does."""
        prompts = self._prompts(chunks)
        us = self._alone_us(prompts, num_sms)
        if not self.step.batch or not decode_sms:
            return us
        return us * self._predictor.slowdown(prompts, num_sms, self.step, decode_sms)

    def mixed_us(self, chunks: Iterable[tuple[int, int]]) -> float:
        """One forward of chunks and all decode rows on the whole device; it draws tokens."""
        layers = self._snapshot.num_layers
        size = Size(
            chunks=tuple([Chunk(*chunk) for chunk in chunks]),
            layers=layers,
            num_layers=layers,
            head=True,
            batch=self.step.batch,
            total_kv=self.step.total_kv,
        )
        return self._predictor.alone_us(size, self._snapshot.num_sms)

    def layers_of_a_step(
        self, chunks: Iterable[tuple[int, int]], decode_sms: int, prefill_sms: int
    ) -> int:
        """Layers of prompts that take as long as a decode step, each beside the other.

        N = ceil(T_d * N_T / T_p), at least 1.

        Source: MuxWise section 3.4.2.
        """
        chunks = tuple(chunks)
        step_us = self.step_beside_us(decode_sms, chunks, prefill_sms)
        prompts_us = self.prompts_beside_us(chunks, prefill_sms, decode_sms)
        return max(1, ceil(step_us * self._snapshot.num_layers / prompts_us))

    def layers_within(self, chunks: Iterable[tuple[int, int]], limit_us: float) -> int:
        """Layers of prompts that the whole device runs between two of its decode steps, so that
        both together take no longer than a limit; at least 1."""
        num_sms = self._snapshot.num_sms
        layer_us = self.prompts_us(chunks, num_sms) / self._snapshot.num_layers
        return max(1, int((limit_us - self.step_us(num_sms)) / layer_us))

    def _prompts(self, chunks: Iterable[tuple[int, int]]) -> Size:
        key = tuple(chunks)
        size = self._sizes.get(key)
        if size is None:
            layers = self._snapshot.num_layers
            size = Size(tuple([Chunk(*chunk) for chunk in key]), layers, layers)
            self._sizes[key] = size
        return size

    def _alone_us(self, size: Size, num_sms: int) -> float:
        key = size, num_sms
        us = self._alone.get(key)
        if us is None:
            us = self._alone[key] = self._predictor.alone_us(size, num_sms)
        return us
