"""Both ways into a declared operator: torch.library, for torch.compile, fake tensors and modes, and
past torch's dispatcher wherever nothing needs it.

An operator without results is registered once; others twice, functional and `_out`; one whose
result may be its anchor under a name of its own (`Operator.in_place_name`) a third time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smkern.ops.aliasing import same_view
from smkern.ops.checks import as_num_sms
from smkern.ops.operator import Operator
from smkern.ops.operator_autograd import autograd_kernel
from smkern.ops.operator_check import check_kinds, check_operator
from smkern.ops.operator_eager import run_here, states_of
from smkern.ops.operator_source import PLAIN, entry_function, library_function

NAMESPACE = "smkern"
"""`torch.ops.smkern`."""


def define(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
) -> None:
    """Define an operator: one implementation for CPU and CUDA, one for fakes, and no backward."""
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    library.define(schema, tags=tags)
    name = schema.partition("(")[0]
    library.impl(name, implementation, "CPU")
    library.impl(name, implementation, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    library.impl(name, autograd_kernel(overload), "Autograd", with_keyset=True)


def register(*ops: Operator[Any]) -> torch.library.Library:
    """Define operators with their CPU, CUDA and fake implementations.

    Returns:
        The registration, which lasts as long as the object does.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for op in ops:
        _define(library, op, schema_of(op, returns=True), returns=True)
        if op.results:
            _define(library, op, schema_of(op, returns=False))
        if op.in_place_name:
            _define(library, op, _in_place_schema(op), in_place=op.results[0])
    return library


def entry(op: Operator[Any]) -> Callable[..., Any]:
    """What runs a call, given its fields in order."""
    return entry_function(op, states_of(op), run)


def run(op: Operator[Any], call: Any) -> Any:
    """Directly where plain tensors meet no mode, else by torch's dispatcher."""
    if not torch.compiler.is_compiling():
        check_kinds(op, call)
        plain = all(getattr(call, name.partition(".")[0]).__class__ in PLAIN for name in op.tensors)
        if (
            (plain or op.parts)
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._functorch.peek_interpreter_stack() is None
            and op.device_of(call).type in ("cuda", "cpu")
        ):
            return run_here(op, call)
        if _is_static(op, call):
            check_operator(op, call)
        if call.num_sms is not None:
            as_num_sms(call.num_sms)
    return through_library(op, call)


def schema_of(op: Operator[Any], *, returns: bool) -> str:
    """The functional operator's schema, or that of the one that writes into given results."""
    first, _, rest = f"{op.schema}, ".partition("*, ")
    last = "SymInt? num_sms=None"
    if not returns:
        first += "".join(f"Tensor(r{at}!) {name}, " for at, name in enumerate(op.results))
        last += ", Tensor(w!)? workspace=None" if "workspace" in op.call._fields else ""
    count = len(op.results) if returns else 0
    result = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    name = op.name if returns else f"{op.name}_out"
    return f"{name}({first}*, {rest}{last}) -> {result}"


def _in_place_schema(op: Operator[Any]) -> str:
    """The schema of the operator whose result is its first argument."""
    schema = op.schema.replace("Tensor ", "Tensor(r0!) ", 1)
    return f"{op.in_place_name}({schema}, SymInt? num_sms=None) -> ()"


def through_library(op: Operator[Any], call: Any) -> Any:
    """By torch's dispatcher: under torch.compile, modes and transforms, for tensor subclasses."""
    if op.through_library is not None:
        return op.through_library(call)
    compiling = torch.compiler.is_compiling()
    positional, _, keywords = op.schema.partition("*, ")
    values = call._asdict()
    rows = [values[name] for name in _names(positional)]
    options: dict[str, Any] = {"num_sms": call.num_sms}
    names = _names(keywords)
    for name in names:
        value = values[name if name in values else name.removesuffix("_tensor")]
        # one field of the call, two arguments of the schema
        other_kind = isinstance(value, Tensor) == (name in values)
        if f"{name}_tensor" in names or name not in values:
            value = None if other_kind else value
        options[name] = value
    operators = getattr(torch.ops, NAMESPACE)
    given = op.results_of(call)
    workspace = values.get("workspace")
    if workspace is None and all(x is None for x in given):
        return getattr(operators, op.name)(*rows, **options)
    if op.in_place_name:
        x, out = rows[0], given[0]
        if out is x or (not compiling and isinstance(out, Tensor) and same_view(out, x)):
            getattr(operators, op.in_place_name)(*rows, **options)
            return out
    if any(x is None for x in given):
        like = getattr(call, op.anchor)
        shapes = op.shapes(call)
        given = tuple(
            like.new_empty(wanted[0], dtype=wanted[1]) if x is None else x
            for x, wanted in zip(given, shapes, strict=True)
        )
    if workspace is not None:
        options["workspace"] = workspace
    getattr(operators, f"{op.name}_out")(*rows, *given, **options)
    return given[0] if len(given) == 1 else given


def _names(arguments: str) -> list[str]:
    """Names of a piece of a schema."""
    parts = [part for part in arguments.split(", ") if part.strip()]
    return [part.split("=")[0].split()[-1] for part in parts]


def _define(
    library: torch.library.Library,
    op: Operator[Any],
    schema: str,
    *,
    returns: bool = False,
    in_place: str = "",
) -> None:
    """Define one of an operator's schemas: functional, or one that writes results or its anchor."""
    returns = returns and bool(op.results)
    options: dict[str, Any] = {"returns": returns, "in_place": in_place}
    implementation = library_function(op, schema, run_here, states_of(op), **options)
    define(library, schema, implementation, library_function(op, schema, _fake, **options))


def _fake(op: Operator[Any], call: Any) -> Any:
    """Results of a call's shapes."""
    like = getattr(call, op.anchor)
    made = tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in _checked(op, call))
    return made[0] if len(made) == 1 else made


def _checked(op: Operator[Any], call: Any) -> Any:
    """The results' shapes; symbolic sizes are held to nothing here, they are checked in the run."""
    return check_operator(op, call) if _is_static(op, call) else op.shapes(call)


def _is_static(op: Operator[Any], call: Any) -> bool:
    """Whether all sizes of a call's tensors are plain numbers."""
    tensors = [x for x in (op.tensor_of(call, name) for name in op.tensors) if x is not None]
    return all(type(n) is int for x in tensors for n in (*x.shape, *x.stride()))
