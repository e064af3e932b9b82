"""A model's decode step, prompt layers and mixed forwards, ready to be launched at places."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from smkern.bench.model.model import Model
from smkern.bench.runtime.cases import RuntimePlan
from smkern.bench.runtime.stamps import Stamps
from smkern.measure.captured import Captured, Run
from smkern.models import ModelConfig
from smkern.partition import Partition
from smkern.runtime.place import Place

PartitionOf = Callable[[Place], Partition | None]
"""The partition of a place; None: the whole device."""


class ModelSteps(ABC):
    """One provider's model; all is launched on the current stream.

    Args:
        model: Its decoder and caches.
        stamps: Get the moments of decode steps.

    Attributes:
        provider: Name of whose kernels these are.
        config: The model's sizes.
        num_layers: Layers of the model.
    """

    provider: str
    config: ModelConfig
    num_layers: int

    def __init__(
        self, plan: RuntimePlan, model: Model, stamps: Stamps, partition: PartitionOf
    ) -> None:
        self._plan, self._model = plan, model
        self._on_gpu = model.device != "cpu"
        self._graphs = Graphs(stamps, partition, on_gpu=self._on_gpu)
        self.config = model.config
        self.num_layers = model.config.num_layers

    @abstractmethod
    def prepare(self, place: Place) -> None:
        """Make ready what runs there: compile, load, capture. A place twice is fine."""

    def decode(self, place: Place) -> None:
        """Launch one decode step; its beginning and its end are stamped."""
        self._graphs.launch(place)

    @abstractmethod
    def layers(self, first: int, count: int, place: Place) -> None:
        """Launch layers of the prompt: with the first what is before it, with the last the head."""

    @abstractmethod
    def mixed(self, chunk: int, start: int) -> Forward:
        """One forward of `chunk` tokens of prompts, the first of them at `start` of its prompt,
        and one token of each decoding request, on the whole device."""

    def close(self) -> None:
        """Destroy graphs; nothing may run."""
        self._graphs.close()


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """A forward of fixed inputs.

    Attributes:
        run: Runs it as users do.
        token_ids: What it reads.
        logits: What it gives.
    """

    run: Run
    token_ids: Tensor
    logits: Tensor


class Graphs:
    """A stamped decode step as a graph of each place.

    Args:
        stamps: Get each step's beginning and end.
        on_gpu: Whether there are graphs.
    """

    def __init__(self, stamps: Stamps, partition: PartitionOf, *, on_gpu: bool) -> None:
        self._stamps, self._partition, self._on_gpu = stamps, partition, on_gpu
        self._captured: dict[Place, Captured] = {}

    def prepare(
        self, place: Place, step_in: Callable[[Partition | None], Run], pool: Any = None
    ) -> None:
        """Capture a place's step, once; `step_in` makes it for a partition."""
        if place.side == "prefill" or place in self._captured:
            return
        partition = self._partition(place)
        step = step_in(partition)

        def run() -> None:
            self._stamps.mark()
            step()
            self._stamps.mark()

        self._captured[place] = Captured(run, partition, on_gpu=self._on_gpu, pool=pool)

    def launch(self, place: Place) -> None:
        self._captured[place].replay()

    def close(self) -> None:
        for graph in self._captured.values():
            graph.close()
        self._captured.clear()


@dataclass(frozen=True, slots=True, eq=False)
class MixedRows:
    """The requests of a mixed forward: pieces of prompts, then those that decode.

    Attributes:
        counts: New tokens of each.
        lengths: Keys of each, the new ones included.
        table: [requests, max_pages] int32.
        pieces: How many are pieces of prompts.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    table: Tensor
    pieces: int

    @classmethod
    def of(cls, plan: RuntimePlan, model: Model, chunk: int, start: int) -> MixedRows:
        pieces = pieces_of(chunk, start, plan.tokens)
        prompt, decode = model.caches.prefill, model.caches.decode[: plan.batch]
        columns = max(prompt.shape[1], decode.shape[1])
        table = decode.new_zeros(len(pieces) + plan.batch, columns)
        table[: len(pieces), : prompt.shape[1]] = prompt
        table[len(pieces) :, : decode.shape[1]] = decode
        counts = tuple(count for count, _ in pieces) + (1,) * plan.batch
        lengths = tuple(sum(piece) for piece in pieces) + (plan.context,) * plan.batch
        return cls(counts, lengths, table, len(pieces))


def pieces_of(chunk: int, start: int, tokens: int) -> list[tuple[int, int]]:
    """(tokens, those before them) of the pieces of a chunk that may run into further prompts."""
    pieces = []
    while chunk > 0:
        count = min(chunk, tokens - start)
        pieces.append((count, start))
        chunk, start = chunk - count, 0
    return pieces
