"""What a launch of a model is made of: plain numbers that a predictor can price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["decode", "prefill", "mixed"]
"""A decode step, prompts, or both in one forward."""


class Chunk(NamedTuple):
    """New tokens of a prompt behind what its cache holds.

    Attributes:
        new: Tokens that are computed.
        cached: Tokens in front of them whose keys and values are there.
    """

    new: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """One launch: some layers of some prompts, a decode step, or both in one forward.

    Attributes:
        chunks: Prompts' tokens.
        layers: Layers of them that this launch runs; a decode step runs all.
        num_layers: Layers of the model.
        head: Whether logits are made and tokens drawn for the chunks.
        batch: Rows of a decode step, those of its graph's padding left out.
        total_kv: Keys that these rows read together.
    """

    chunks: tuple[Chunk, ...] = ()
    layers: int = 0
    num_layers: int = 1
    head: bool = False
    batch: int = 0
    total_kv: int = 0

    @property
    def kind(self) -> Kind:
        """What it is; a launch of nothing counts as a decode step."""
        if not self.chunks:
            return "decode"
        return "mixed" if self.batch else "prefill"

    @property
    def ends(self) -> bool:
        """Whether prompts' last layer is among its layers: behind attention that computes the rows
        of logits alone. The last of several groups of layers does not tell where nothing is drawn.
        """
        if not self.chunks:
            return False
        return self.head or self.batch > 0 or self.layers == self.num_layers

    @property
    def new_tokens(self) -> int:
        """Tokens of prompts that are computed."""
        return sum(chunk.new for chunk in self.chunks)


def padded_rows(rows: int) -> int:
    """Rows that are computed where a forward with prompts has so many: 16, then every 32, above 256
    every 64, no more than tiles of its GEMMs.

    A number of rows that comes for the first time takes a GPU's host 10 ms, so few occur.

    Example:
        >>> [padded_rows(rows) for rows in (1, 20, 65, 256, 257, 2048)]
        [16, 32, 96, 256, 320, 2048]
    """
    if rows <= 16:
        return 16
    step = 32 if rows <= 256 else 64
    return -(-rows // step) * step
