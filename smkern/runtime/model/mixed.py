"""One forward of prompts' chunks and a token of each request that decodes, on the whole device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from smkern.latency import Size
from smkern.models.layered import LayeredModel, forward
from smkern.models.plan_memory import PlanMemory
from smkern.models.step import Step
from smkern.runtime.device import Work
from smkern.runtime.executor import PrefillChunk, size_chunks
from smkern.runtime.interleaver import MAX_QUEUED_LAUNCHES
from smkern.runtime.model import sizes
from smkern.runtime.model.graphs import GraphCache
from smkern.runtime.model.marks import Mark, mark_ring
from smkern.runtime.model.mixed_graph import MixedGraph, MixedInputs
from smkern.runtime.model.prefill import PrefillBuffers
from smkern.runtime.model.reads import Read, Source
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.row_updates import RowUpdate
from smkern.runtime.place import Place

LayerDone = Callable[[int], object]
"""Called with the number of a layer that was launched."""
OTHER_LAUNCHES = 17
"""Launches of a forward beside its layers, or with these as one graph, at most."""


def launch_mixed(
    model: LayeredModel,
    step: Step,
    graph: MixedGraph | None,
    plans: PlanMemory,
    behind: LayerDone | None = None,
) -> Tensor:
    """Launch a forward; its logits.

    Args:
        step: What was written of it.
        graph: Of its layers; None: they are launched one by one.
        plans: Memory of their plan then.
        behind: Called with each of them.
    """
    if graph is None:
        return forward(model, step.planned_in(plans), behind)
    graph.launch()
    return model.head(step)


class MixedRunner:
    """Runs chunks and decode rows as one ragged forward.

    The chunks' rows lie in front of the slots, the chunks' token ids in front of a copy of the
    slots' tokens: whatever the numbers, the forward reads ranges. Nothing of what the step before
    drew is needed on the host, so steps are launched ahead. On the whole device its layers are a
    graph where there is one of so many rows.

    Args:
        prompts: Buffers of prefill slot 0: plan of what no graph serves.

    Attributes:
        launches: Kernels of a forward, at most.
    """

    def __init__(
        self,
        model: LayeredModel,
        inputs: MixedInputs,
        state: RowState,
        prompts: PrefillBuffers,
        graphs: GraphCache,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._state = state
        self._prompts = prompts
        self._graphs = graphs
        layers, summed = model.config.num_layers, sizes.is_summed(model)
        self._layer_launches = sizes.layer_launches(model.config, summed=summed)
        self.launches = layers * self._layer_launches + OTHER_LAUNCHES
        # Only where two forwards are more than a stream's queue holds.
        self._marks: Iterator[Mark] | None = None
        if state.device.type == "cuda" and 2 * self.launches > MAX_QUEUED_LAUNCHES:
            self._marks = mark_ring(layers, self.launches, state.device)

    def work(
        self,
        launch: Callable[[Place, LayerDone | None], Any],
        chunks: Sequence[PrefillChunk],
        lengths: Sequence[int],
    ) -> Work:
        """A forward to be launched, which tells how far it is where it is long.

        Args:
            launch: Runs it at a place, with what `run` takes as `behind`.
            chunks, lengths: As of `run`.
        """
        layers = self._model.config.num_layers
        size = Size(size_chunks(chunks), layers, layers, True, len(lengths), sum(lengths))
        about = {"requests": [chunk.request.index for chunk in chunks]}
        has_graph = self._graph(chunks, lengths) is not None
        if has_graph or self._marks is None:
            # the head has the end of the last layer with it
            launches = self._layer_launches + OTHER_LAUNCHES if has_graph else self.launches
            return Work("mixed", lambda place: launch(place, None), size, launches, about)
        mark = next(self._marks)
        return Work(
            "mixed", lambda place: launch(place, mark.layer_done), size, self.launches, about,
            lambda end: mark.left(),
        )  # fmt: skip

    def run(
        self,
        place: Place,
        chunks: Sequence[PrefillChunk],
        lengths: Sequence[int],
        update: RowUpdate,
        read: Read,
        behind: LayerDone | None = None,
    ) -> None:
        """Launch the forward on the current stream.

        Args:
            place: The SMs that it takes.
            chunks: The chunks, by row in front of the slots.
            lengths: A bound of the keys of each request that decodes.
            update: Gives both their rows.
            read: Gets the tokens: the chunks', then the slots'.
            behind: Called with each layer that is launched one by one.
        """
        read.reserve()  # once it has drawn, what runs has advanced: nothing may raise any more
        update.send()
        graph = self._graph(chunks, lengths) if place.side == "whole" else None
        step = self._inputs.write(chunks, lengths)
        logits = launch_mixed(self._model, step, graph, self._prompts.plans, behind)
        rows = self._state.inputs(self._state.first_slot - len(chunks), step.batch)
        rows.draw(logits, step.kv_lens, num_sms=step.num_sms)
        read.copy(Source.of(rows.token_ids))

    def _graph(self, chunks: Sequence[PrefillChunk], lengths: Sequence[int]) -> MixedGraph | None:
        count = sum(chunk.count for chunk in chunks) + len(lengths)
        return self._graphs.mixed(count, max([*(chunk.end for chunk in chunks), *lengths]))
