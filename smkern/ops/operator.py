"""How an operator is declared: all of its host side follows from one `Operator`.

A family declares an `Operator` for each of its operators, registers it and makes its entry:

    Scale = call_class("Scale", "Tensor x, *, float by=1.0")
    SCALE = Operator(
        name="scale", call=Scale,
        check=check_scale,                 # raises ArgumentError; sees no address
        shapes=lambda call: ((call.x.shape, call.x.dtype),),  # of each result
        problem=problem_of_scale,          # (call, aligned) -> what chooses kernels; None: no work
        numbers=lambda call: (call.x.stride(0), call.by),  # behind the addresses of the launch
        reference=lambda call: reference.scale(call.x, call.by),
        dispatcher=scale_dispatcher,       # cached: index -> OperatorDispatcher
        vectors=("x", "out"),              # their addresses decide `aligned`
    )
    LIBRARY = register(SCALE)              # operator_library.py: torch.ops.smkern.scale, scale_out
    _scale = entry(SCALE)                  # past torch's dispatcher where nothing needs it

    def scale(x, *, by=1.0, out=None, num_sms=None):
        # the public docstring
        return _scale(x, by, out, num_sms)

The checks, the budget, the choice and the preparation are made once a combination of sizes,
strides, dtypes, devices, numbers and budget, and kept as a `Record`. Every call checks that what
it writes overlaps nothing, allocates results, and runs `launch(stream, *addresses, [workspace,]
*numbers)` with the addresses (0: absent) of all tensors in the call's order. That path is Python
made from the declaration (operator_source.py). CPU tensors run the reference with the same checks;
what it returns is copied into given results, unless it wrote those.

A tensor argument that is changed in place carries "(a!)" in the schema (each its own letter). A
number that may also be one tensor is two arguments in the schema, "float? by=None, Tensor?
by_tensor=None", and one field `by` of the call. Results that may be an argument itself, element
for element, are in `in_place`. A family whose launches need zeroed counters or scratch memory says
how much in `workspace`; it follows `smkern.ops.workspace` (counters first, left at zero).
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections import namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from smkern.ops.operator_dispatch import Launch, P

Shapes = tuple[Any, ...]
"""(shape, dtype) of each result; None for one that this call does not make."""

_TENSOR = re.compile(r"Tensor(\(\w+!\))?\??$")
_REQUIRED = object()


class Bound(NamedTuple):
    """A launch of one combination of numbers; `launch` is None where nothing runs.

    Each call also gets `scratch_bytes` of device memory of its own, from the stream's pool.
    """

    launch: Launch | None
    numbers: tuple[Any, ...] = ()
    workspace_bytes: int = 0
    scratch_bytes: int = 0


class Part(NamedTuple):
    """An argument that is no tensor and holds some.

    Args:
        kind: The argument's class.
        key: The hashable attribute that decides everything about it but addresses.
        tensors: The attributes that a launch takes.
    """

    kind: type
    key: str
    tensors: tuple[str, ...]


def call_class(
    name: str, schema: str, results: tuple[str, ...] = ("out",), *, workspace: bool = False
) -> Any:
    """The NamedTuple of an operator's calls: arguments, results (None: to be made), `num_sms`.

    Args:
        name: The class's name.
        schema: The arguments as torch.library writes them, without results and `num_sms`.
        results: What the call may bring to be written.
        workspace: Whether it may also bring a workspace, behind the results.

    Example:
        >>> from smkern.ops.operator import call_class
        >>> Scale = call_class("Scale", "Tensor x, *, float? by=1.0, Tensor? by_tensor=None")
        >>> Scale(3)
        Scale(x=3, by=1.0, out=None, num_sms=None)
    """
    fields: dict[str, Any] = {}
    for item in schema.split(", "):
        argument, _, default = item.partition("=")
        field_name = argument.split()[-1]
        if item != "*" and field_name.removesuffix("_tensor") not in fields:
            fields[field_name] = literal_eval(default) if default else _REQUIRED
    fields |= dict.fromkeys((*results, *["workspace"] * workspace, "num_sms"))
    defaults = [value for value in fields.values() if value is not _REQUIRED]
    make: Any = namedtuple  # mypy takes literals alone
    made = make(name, fields, defaults=defaults)
    made.schema, made.results = schema, results
    return made


def filled_by(reference: Callable[[Any], Any]) -> Callable[[Any], None]:
    """`Operator.empty` of a product whose reference writes into `out`: K of 0 makes zeros."""

    def fill(call: Any) -> None:
        if call.out.numel():
            with torch.no_grad():
                reference(call)

    return fill


def _nothing(call: Any) -> tuple[Any, ...]:
    return ()


@dataclass(frozen=True, slots=True, eq=False)
class Operator(Generic[P]):
    """One operator: what it is called with, what must hold, what runs. See the module.

    Args:
        name: The operator's name in `torch.ops.smkern`.
        call: The NamedTuple of its calls, `num_sms` last.
        check: Raises ArgumentError for a call that cannot be served; its results may be None.
        shapes: Shape and dtype of each result of a checked call.
        problem: (call, aligned) to what chooses a kernel; None where there is nothing to do.
        reference: The operator on CPU tensors; changes in place what the schema says.
        dispatcher: Device index to the family's dispatcher, cached.
        numbers: What the launch takes after the addresses.
        vectors: Arguments and results whose 16-byte alignment chooses kernels.
        watched: Tensor arguments whose alignment `problem` looks at apart from those.
        in_place: Pairs (result, argument) that may be one view.
        workspace: problem to bytes of zeroed scratch memory; None: it needs none.
        anchor: The field that says on which device the call runs; "": the first one.
        arguments: What the launch takes, by name, instead of the usual order: tensors, "stream",
            "workspace", "scratch", "0".
        unkeyed: Fields that take no part in the choice of a kernel.
        parts: Arguments that hold tensors.
        left_out: Results that some calls do not make; their shape is then None.
        prepare: (dispatcher, call, problem, budget, capturing) to a launch, where `numbers`,
            `workspace` and the dispatcher's own `launch` do not do.
        empty: Fills the results of a call without a problem: M, N or K of 0, say.
        check_memory: Checks what a checked call's tensors hold, for `check=True`; reads the device.
        kept_in_capture: Whether a record made in a capture also serves calls outside it.
        through_library: Runs a call by torch's dispatcher, where the operators there take other
            arguments.
        in_place_name: Name in `torch.ops.smkern` of the variant that writes its first argument.
        schema, results: As in `call_class`; given where the call is no class of it.
    """

    name: str
    call: Any
    check: Callable[[Any], Any]
    shapes: Callable[[Any], Shapes]
    problem: Callable[[Any, bool], P | None]
    reference: Callable[[Any], Any]
    dispatcher: Callable[[int], Any]
    numbers: Callable[[Any], tuple[Any, ...]] = _nothing
    vectors: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    in_place: tuple[tuple[str, str], ...] = ()
    workspace: Callable[[P], int] | None = None
    anchor: str = ""
    arguments: tuple[str, ...] = ()
    unkeyed: tuple[str, ...] = ()
    parts: Mapping[str, Part] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    prepare: Callable[[Any, Any, P, Any, bool], Bound] | None = None
    empty: Callable[[Any], None] | None = None
    check_memory: Callable[[Any], None] | None = None
    kept_in_capture: bool = True
    in_place_name: str = ""
    through_library: Callable[[Any], Any] | None = None
    schema: str = ""
    results: tuple[str, ...] = ()
    flags: tuple[str, ...] = field(init=False)
    """Arguments that are True or False."""
    required: tuple[str, ...] = field(init=False)
    """Tensor arguments that every call has."""
    mixed: tuple[str, ...] = field(init=False)
    """Arguments that are a number or a tensor."""
    changed: tuple[str, ...] = field(init=False)
    """Arguments that are changed in place."""
    tensors: tuple[str, ...] = field(init=False)
    """What may be a tensor: fields, and "field.attribute" of parts, in the call's order."""
    pairs: tuple[tuple[str, str, bool], ...] = field(init=False)
    """(written, other, whether they may be one view), to be looked at in every call."""

    def __post_init__(self) -> None:
        for name in () if self.schema else ("schema", "results"):
            object.__setattr__(self, name, getattr(self.call, name))
        words = [item.split("=")[0].split() for item in self.schema.split(", ") if item != "*"]
        kinds = {name: kind for kind, name in words if _TENSOR.match(kind)}
        mixed = tuple(name.removesuffix("_tensor") for name in kinds if name.endswith("_tensor"))
        changed = tuple(name for name, kind in kinds.items() if "!" in kind)
        single = {*kinds, *mixed, *self.results}
        tensors: list[str] = []
        for name in self.call._fields:
            if name in self.parts:
                tensors += [f"{name}.{attribute}" for attribute in self.parts[name].tensors]
            elif name in single:
                tensors.append(name)
        written = (*self.results, *changed)
        pairs = tuple(
            (mine, other, (mine, other) in self.in_place)
            for at, mine in enumerate(written)
            for other in tensors
            if other not in written[: at + 1]
        )
        given: dict[str, Any] = {
            "anchor": self.anchor or self.call._fields[0],
            "flags": tuple(name for kind, name in words if kind == "bool"),
            "required": tuple(
                name for name, kind in kinds.items() if kind[-1] != "?" and name in tensors
            ),
            "mixed": mixed,
            "changed": changed,
            "tensors": tuple(tensors),
            "pairs": pairs,
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def tensor_of(self, call: Any, name: str) -> Tensor | None:
        """One of `tensors` of a call; None where it has none of that name."""
        if "." in name:
            owner, attribute = name.split(".")
            x = getattr(getattr(call, owner), attribute, None)
        else:
            x = getattr(call, name)
        return x if isinstance(x, Tensor) else None

    def addresses(self, call: Any) -> tuple[int, ...]:
        """What a launch is given of a call that has all results: its tensors' addresses."""
        names = [x for x in self.arguments if x not in ("stream", "workspace", "scratch")]
        tensors = (self.tensor_of(call, x) if x != "0" else None for x in names or self.tensors)
        return tuple(0 if x is None else x.data_ptr() for x in tensors)

    def device_of(self, call: Any) -> torch.device:
        """Where a call runs."""
        device: torch.device = getattr(call, self.anchor).device
        return device

    def results_of(self, call: Any) -> tuple[Any, ...]:
        """The results that a call brings, None for those that are to be made."""
        return tuple(getattr(call, name) for name in self.results)
