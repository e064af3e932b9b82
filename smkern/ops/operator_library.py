"""Small operators in torch.library: for torch.compile, fake tensors, modes.

An operator without results is registered once; others twice, functional and `_out`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.namespace import NAMESPACE
from smkern.ops.operator import Operator
from smkern.ops.operator_check import check_operator
from smkern.ops.operator_eager import run_here


def register(*ops: Operator[Any]) -> torch.library.Library:
    """Define operators with their CPU, CUDA and fake implementations.

    Returns:
        The registration, which lasts as long as the object does.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for op in ops:
        _define(library, op, op.name, returns=True)
        if op.results:
            _define(library, op, f"{op.name}_out", returns=False)
    return library


def schema_of(op: Operator[Any], *, returns: bool) -> str:
    """The functional operator's schema, or that of the one that writes into given results."""
    first, _, rest = f"{op.schema}, ".partition("*, ")
    if not returns:
        first += "".join(f"Tensor(r{at}!) {name}, " for at, name in enumerate(op.results))
    count = len(op.results) if returns else 0
    result = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    name = op.name if returns else f"{op.name}_out"
    return f"{name}({first}*, {rest}SymInt? num_sms=None) -> {result}"


def through_library(op: Operator[Any], call: Any) -> Any:
    """By torch's dispatcher: under torch.compile, modes and transforms, for tensor subclasses."""
    if not torch.compiler.is_compiling() and not isinstance(call[0], Tensor):
        check_operator(op, call)  # which refuses it
    given = op.results_of(call)
    absent = sum(x is None for x in given)  # `count` would compare tensors
    if absent not in (0, len(given)):
        raise ArgumentError(
            f"some of {list(op.results)} are given and some are not: give all or none under "
            "torch.compile, modes and transforms"
        )
    positional, _, keywords = op.schema.partition("*, ")
    values = call._asdict()
    rows = [values[name] for name in _names(positional)]
    options: dict[str, Any] = {"num_sms": call[-1]}
    names = _names(keywords)
    for name in names:
        value = values[name if name in values else name.removesuffix("_tensor")]
        # one field of the call, two arguments of the schema
        other_kind = isinstance(value, Tensor) == (name in values)
        if f"{name}_tensor" in names or name not in values:
            value = None if other_kind else value
        options[name] = value
    operators = getattr(torch.ops, NAMESPACE)
    if not given or given[0] is None:
        return getattr(operators, op.name)(*rows, **options)
    getattr(operators, f"{op.name}_out")(*rows, *given, **options)
    return given[0] if len(given) == 1 else given


def _names(arguments: str) -> list[str]:
    """Names of a piece of a schema."""
    parts = [part for part in arguments.split(", ") if part.strip()]
    return [part.split("=")[0].split()[-1] for part in parts]


def _define(library: torch.library.Library, op: Operator[Any], name: str, *, returns: bool) -> None:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    library.define(schema_of(op, returns=returns), tags=tags)
    positional = _names(op.schema.partition("*, ")[0])
    if not returns:
        positional += op.results

    def call_of(rows: tuple[Any, ...], options: dict[str, Any]) -> Any:
        values = dict(zip(positional, rows, strict=False)) | options
        fields = op.call._fields
        for key in [key for key in values if key not in fields]:
            tensor = values.pop(key)
            if tensor is not None:
                values[key.removesuffix("_tensor")] = tensor
        return op.call(**values)

    def implementation(*rows: Any, **options: Any) -> Any:
        found = run_here(op, call_of(rows, options))
        return found if returns and op.results else None

    def fake(*rows: Any, **options: Any) -> Any:
        call = call_of(rows, options)
        shapes = _checked(op, call)
        if not (returns and op.results):
            return None
        made = tuple(call[0].new_empty(shape, dtype=dtype) for shape, dtype in shapes)
        return made[0] if len(made) == 1 else made

    library.impl(name, implementation, "CPU")
    library.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)


def _checked(op: Operator[Any], call: Any) -> Any:
    """The results' shapes; symbolic sizes are held to nothing here, they are checked in the run."""
    tensors = [x for x in call if isinstance(x, Tensor)]
    if all(type(n) is int for x in tensors for n in (*x.shape, *x.stride())):
        return check_operator(op, call)
    return op.shapes(call)
