"""The protocol of a model that a runtime launches a layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.models.config import ModelConfig
from smkern.models.step import Step


class LayeredModel(Protocol):
    """A model in parts, each launched on the current stream without waiting; `Decoder` is one.

    Attributes:
        config: The model's sizes.
        device: Device of its weights.
        max_position: Tokens of a request, at most.
        batch_invariant: Whether a token's bits follow from its request alone.
        representative_layers: Layers that between them launch every kernel of a step's layers; all
            of them, where layers may differ.
    """

    config: ModelConfig
    device: torch.device
    max_position: int
    batch_invariant: bool
    representative_layers: Sequence[int]

    def embed(self, step: Step) -> Tensor:
        """The tokens' embeddings into `step.buffers.hidden`."""
        ...

    def layer(self, index: int, step: Step) -> Tensor:
        """One layer: `step.buffers.hidden` in place, keys and values into their pages.

        Of the last one what follows attention may be left to `head`."""
        ...

    def head(self, step: Step) -> Tensor:
        """Logits [batch, vocab_size] of each request's last token, in `step.buffers.logits`."""
        ...


def checked_positions(config: ModelConfig, max_position: int | None) -> int:
    """The positions that a model is made for; None: its whole context.

    Raises:
        ArgumentError: more than its context has, or none.
    """
    positions = config.max_position if max_position is None else max_position
    if not 1 <= positions <= config.max_position:
        raise ArgumentError(
            f"max_position={positions}: the model's context has {config.max_position}; give 1 to "
            "that"
        )
    return positions


def forward(
    model: LayeredModel, step: Step, behind: Callable[[int], object] | None = None
) -> Tensor:
    """A whole step: embed, layers, head; makes the plan where the step has none.

    Args:
        model: The model.
        step: The step.
        behind: Called with the number of each layer when it is launched.
    """
    if step.plan is None:
        step = step.planned()
    all_layers(model, step, behind)
    return model.head(step)


def all_layers(
    model: LayeredModel, step: Step, behind: Callable[[int], object] | None = None
) -> None:
    """A planned step without its head: embed and layers; arguments as of `forward`."""
    model.embed(step)
    for index in range(model.config.num_layers):
        model.layer(index, step)
        if behind is not None:
            behind(index)


def warming_layers(model: LayeredModel, step: Step) -> None:
    """Of `all_layers` as much as launches each of its kernels, whatever comes out."""
    model.embed(step)
    for index in model.representative_layers:
        model.layer(index, step)
