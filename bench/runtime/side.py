"""What both lanes run in the steady state: a model's decode step, prompt layers, mixed forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from smkern.runtime.place import Place


class Side(Protocol):
    """One implementation of a model, ready to be launched at places; all on the current stream.

    Attributes:
        provider: Whose kernels these are.
        num_layers: Of the model.
    """

    provider: str
    num_layers: int

    def prepare(self, place: Place) -> None:
        """Make ready what runs there: compile, load, capture. A place twice is fine."""
        ...

    def decode(self, place: Place) -> None:
        """Launch one decode step; its beginning and its end are stamped."""
        ...

    def layers(self, first: int, count: int, place: Place) -> None:
        """Launch layers of the prompt: with the first what is before it, with the last the head."""
        ...

    def mixed(self, chunk: int, start: int) -> Callable[[], None]:
        """What launches one forward of `chunk` tokens of prompts, the first of them at `start` of
        its prompt, and one token of each decoding request, on the whole device."""
        ...

    def close(self) -> None:
        """Destroy graphs; nothing may run."""
        ...
