"""A frame for small operators: all that a family would otherwise spell out in eight files.

A family declares an `Operator` for each of its operators and calls `run` (operator_run.py) with a
call of it:

    class Scale(NamedTuple):               # the arguments in the schema's order, the results
        x: Any                             # (None: to be made), `num_sms` last
        by: Any
        out: Any = None
        num_sms: Any = None

    SCALE = Operator(
        name="scale", call=Scale, schema="Tensor x, *, float by=1.0", results=("out",),
        check=check_scale,                 # raises ArgumentError; sees no address
        shapes=lambda call: ((call.x.shape, call.x.dtype),),  # of each result
        problem=problem_of_scale,          # (call, aligned) -> what chooses kernels; None: no work
        numbers=lambda call: (call.x.stride(0), call.by),  # behind the addresses of the launch
        reference=lambda call: reference.scale(call.x, call.by),
        dispatcher=scale_dispatcher,       # cached: index -> OperatorDispatcher
        vectors=("x", "out"),              # their addresses decide `aligned`
    )
    LIBRARY = register(SCALE)              # operator_library.py: torch.ops.smkern.scale, scale_out

    def scale(x, *, by=1.0, out=None, num_sms=None):
        \"\"\"The public docstring.\"\"\"
        return run(SCALE, Scale(x, by, out, num_sms))

What the frame does: the checks, the budget, the choice and the preparation once a combination of
sizes, strides, dtypes, devices, numbers and budget; in every call overlap of what is written, the
results' allocation, and `launch(stream, *addresses, [workspace,] *numbers)`, the addresses (0:
absent) of all tensor arguments and results in the call's order. CPU tensors run the reference with
the same checks; what it returns is copied into given results, so that it needs no `out`.

A tensor argument that is changed in place carries "(a!)" in the schema (each its own letter). A
number that may also be one tensor is two arguments in the schema, "float? by=None, Tensor?
by_tensor=None", and one field `by` of the call. Results that may be an argument itself, element for
element, are in `in_place`. A family whose launches need zeroed counters or scratch memory says how
much in `workspace`; it follows `smkern.ops.workspace` (counters first, left at zero).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic

import torch

from smkern.ops.operator_dispatch import OperatorDispatcher, P

Shapes = tuple[tuple[Any, torch.dtype], ...]
"""Shape and dtype of each result."""

_TENSOR = re.compile(r"Tensor(\(\w+!\))?\??$")


def _no_workspace(problem: Any, budget: Any) -> int:
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class Operator(Generic[P]):
    """One operator: what it is called with, what must hold, what runs. See the module.

    Args:
        name: In `torch.ops.smkern`.
        call: The NamedTuple of its calls; the first field is a tensor whose device decides.
        schema: Its arguments as torch.library writes them, without results and `num_sms`.
        results: Fields of the call that name the results.
        check: Raises ArgumentError for what cannot be served, of a call whose results may be None.
        shapes: Shape and dtype of each result of a checked call.
        problem: (call, aligned) to what chooses a kernel, None where nothing is to be done.
        numbers: What the launch takes behind the addresses.
        reference: The operator on CPU tensors; changes in place what the schema says.
        dispatcher: Device index to the family's dispatcher, cached.
        vectors: Arguments and results whose 16-byte alignment chooses kernels.
        in_place: Pairs (result, argument) that may be one view.
        workspace: (problem, budget) to bytes of zeroed scratch memory.
    """

    name: str
    call: Any
    schema: str
    results: tuple[str, ...]
    check: Callable[[Any], None]
    shapes: Callable[[Any], Shapes]
    problem: Callable[[Any, bool], P | None]
    numbers: Callable[[Any], tuple[Any, ...]]
    reference: Callable[[Any], Any]
    dispatcher: Callable[[int], OperatorDispatcher[P, Any]]
    vectors: tuple[str, ...] = ()
    in_place: tuple[tuple[str, str], ...] = ()
    workspace: Callable[[P, Any], int] = _no_workspace
    places: tuple[int, ...] = field(init=False)
    """Fields of a call that may be tensors."""
    changed: tuple[str, ...] = field(init=False)
    """Arguments that are changed in place."""
    pairs: tuple[tuple[int, int, bool], ...] = field(init=False)
    """(written, other, whether they may be one view) fields, to be looked at in every call."""
    aligned_at: tuple[int, ...] = field(init=False)
    """Fields of `vectors`."""
    results_at: tuple[int, ...] = field(init=False)
    """Fields of `results`."""

    def __post_init__(self) -> None:
        words = [item.split("=")[0].split() for item in self.schema.split(", ") if item != "*"]
        tensors = {name.removesuffix("_tensor") for kind, name in words if _TENSOR.match(kind)}
        tensors |= {name for kind, name in words if _TENSOR.match(kind)} | set(self.results)
        fields = self.call._fields
        names = [name for name in fields if name in tensors]
        changed = tuple(name for kind, name in words if "!" in kind)
        written = (*self.results, *changed)
        pairs = [
            (fields.index(mine), fields.index(other), (mine, other) in self.in_place)
            for at, mine in enumerate(written)
            for other in names
            if other not in written[: at + 1]
        ]
        given = {
            "places": tuple(fields.index(name) for name in names),
            "changed": changed,
            "pairs": tuple(pairs),
            "aligned_at": tuple(fields.index(name) for name in self.vectors),
            "results_at": tuple(fields.index(name) for name in self.results),
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def results_of(self, call: Any) -> tuple[Any, ...]:
        """The results that a call brings, None for those that are to be made."""
        return tuple(call[at] for at in self.results_at)

    def returned(self, call: Any) -> Any:
        """What a call that has all results returns: one, a tuple of several, or None."""
        if len(self.results_at) == 1:
            return call[self.results_at[0]]
        return self.results_of(call) or None
