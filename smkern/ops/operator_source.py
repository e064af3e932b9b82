"""The eager path of a declared operator as Python source, so that a call interprets nothing.

Two functions are made of one body. `eager(state, *fields)` runs a call on the device whose `state`
(`EagerOperator.state`) it is given; `entry(*fields)` first leaves to `elsewhere` whatever is not
plain tensors of a GPU outside torch's modes, and finds the state by the device. The source is kept
for tracebacks.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.ops.operator import Operator

TENSORS = frozenset({Tensor, Parameter})
OPTIONAL = TENSORS | {NoneType}
PLAIN = OPTIONAL | {int, float, bool}
"""Classes of arguments that torch's dispatcher need not see."""


@cache
def eager_function(op: Operator[Any]) -> Callable[..., Any]:
    """`eager(state, *fields)` of an operator, made once."""
    lines = [f"def eager(_state, {', '.join(op.call._fields)}):", *_indented(_body(op))]
    return _compiled(op, "eager", lines, {})


def entry_function(
    op: Operator[Any], states: Mapping[int, Any], elsewhere: Callable[..., Any]
) -> Callable[..., Any]:
    """`entry(*fields)` of an operator.

    Args:
        states: `EagerOperator.state` by the device's index.
        elsewhere: Runs (op, call) where the GPU's path does not.
    """
    fields = op.call._fields
    tests = ["is_compiling()"]
    for name in fields:
        if name in op.parts:
            tests.append(f"{name} is not None and {name}.__class__ is not {name}_kind")
        elif name in op.tensors:
            known = "TENSORS" if name in op.required else "OPTIONAL"
            known = "PLAIN" if name in op.mixed else known
            tests.append(f"{name}.__class__ not in {known}")
    tests += ["num_modes()", "transform() is not None", f"not {op.anchor}.is_cuda"]
    lines = [
        f"def entry({', '.join(fields)}):",
        "    if (",
        *(f"        {'or ' if at else ''}{test}" for at, test in enumerate(tests)),
        "    ):",
        f"        return elsewhere(op, {_call(op)})",
        f"    _state = states[{op.anchor}.get_device()]",
        *_indented(_body(op)),
    ]
    given = {"states": states, "elsewhere": elsewhere}
    return _compiled(op, "entry", lines, given)


def library_function(
    op: Operator[Any],
    schema: str,
    run: Callable[..., Any],
    states: Mapping[int, Any] | None = None,
    *,
    returns: bool = False,
    in_place: str = "",
) -> Callable[..., Any]:
    """What torch.library calls: a schema's arguments in their places of a call.

    Args:
        schema: `name(arguments) -> results`.
        run: (op, call) to the results.
        states: `EagerOperator.state` by the device's index: calls on a GPU skip `run`.
        returns: Whether the results are returned.
        in_place: The result that is the anchor of the call.
    """
    arguments = [
        item if item == "*" else item.split(maxsplit=1)[1]
        for item in schema[schema.index("(") + 1 : schema.index(") -> ")].split(", ")
    ]
    names = {argument.partition("=")[0] for argument in arguments}
    absent = op.call._field_defaults
    fields = op.call._fields
    values = {name: name if name in names else repr(absent.get(name)) for name in fields}
    for name in op.mixed:
        values[name] = f"{name} if {name}_tensor is None else {name}_tensor"
    if in_place:
        values[in_place] = arguments[0]
    given = ", ".join(values.values())
    lines = [
        f"def library({', '.join(arguments)}):",
        f"    if states is not None and {op.anchor}.is_cuda:",
        f"        found = eager(states[{op.anchor}.get_device()], {given})",
        "    else:",
        f"        found = run(op, Call({given}))",
        f"    return {'found' if returns else None}",
    ]
    space = {"run": run, "states": states, "eager": eager_function(op)}
    return _compiled(op, "library", lines, space, schema.partition("(")[0])


def _compiled(
    op: Operator[Any], kind: str, lines: list[str], given: dict[str, Any], name: str = ""
) -> Callable[..., Any]:
    """Compile the lines of a function `kind`, under a file name that tracebacks find them by."""
    name, source = f"<smkern {kind} path of {name or op.name}>", "\n".join(lines) + "\n"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {
        "op": op, "Call": op.call, "Tensor": Tensor, "TENSORS": TENSORS, "OPTIONAL": OPTIONAL,
        "PLAIN": PLAIN, "uint8": torch.uint8, "is_compiling": torch.compiler.is_compiling,
        "num_modes": torch._C._len_torch_dispatch_stack,
        "transform": torch._C._functorch.peek_interpreter_stack,
    }  # fmt: skip
    space |= given | {f"{field}_kind": part.kind for field, part in op.parts.items()}
    exec(compile(source, name, "exec"), space)
    made: Callable[..., Any] = space[kind]
    return made


def _call(op: Operator[Any]) -> str:
    return f"Call({', '.join(op.call._fields)})"


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _var(name: str) -> str:
    return name.replace(".", "_")


def _body(op: Operator[Any]) -> list[str]:
    """From a device's state to the result; only names of fields begin without an underscore."""
    call, compared = _call(op), {name for pair in op.in_place for name in pair}
    lines = [
        "_index, _current_device, _current_stream, _budget_of, _find, _own = _state",
        "if _current_device() != _index:",
        f"    return _own.on_device({call})",
        "_stream = _current_stream(_index)",
        "_budget = _budget_of(_stream, _index)",
    ]
    keyed: list[str] = []
    key: list[str] = []
    for name in op.call._fields:
        found, parts = _address(op, name, name in compared)
        keyed += found
        key += parts
    low, apart = (" | ".join(f"{x}_ptr" for x in names) for names in (op.vectors, op.watched))
    key += [f"not ({apart}) & 15"] if apart else []
    key += ["num_sms.__class__", "_budget.num_sms", "_budget.confined", "_budget.clusters"]
    keyed += [
        f"_aligned = not ({low or 0}) & 15",
        "_key = (",
        *(f"    {part}," for part in (*key, "_aligned")),
        ")",
    ]
    lines += [
        "try:",
        *_indented(keyed),
        "except Exception:",  # nothing to make a key of: no tensor, a nested one, a sparse one
        f"    _own.refuse({call})",
        "    raise",
        "try:",
        "    _record = _find(_key)",
        "except TypeError:",
        "    _record = None",
        "if _record is None:",
        f"    _record = _own.prepare(_key, {call}, _budget, _aligned)",
        "_launch, _numbers, _needed, _scratch_bytes, _shapes, _spans, _apart = _record",
        *_overlap(op),
    ]
    if op.check_memory is not None:
        lines += ["if check:", f"    _own.check_memory({call})"]
    for at, name in enumerate(op.results):
        wanted = f" and _shapes[{at}] is not None" if name in op.left_out else ""
        new = f"{op.anchor}.new_empty"
        lines += [
            f"if {name} is None{wanted}:",
            f"    _shape, _dtype = _shapes[{at}]",
            f"    _same = _dtype is {op.anchor}.dtype",
            f"    {name} = {new}(_shape) if _same else {new}(_shape, dtype=_dtype)",
            f"    {name}_ptr = {name}.data_ptr()",
        ]
    return [*lines, *_launch(op)]


def _address(op: Operator[Any], name: str, compared: bool) -> tuple[list[str], list[str]]:
    """Statements that find a field's addresses, and its part of the record's key."""
    layout = [f"{name}.shape", f"{name}.stride()", f"{name}.dtype"]
    layout += [] if name == op.anchor else [f"{name}.get_device()"]
    key = f"{name}_key = ({', '.join(layout)})"
    if name in op.parts:
        part = op.parts[name]
        addresses = [f"{name}_{x}_ptr" for x in part.tensors]
        return [
            f"if {name} is None:",
            f"    {name}_key = None",
            f"    {' = '.join(addresses)} = 0",
            "else:",
            f"    if {name}.__class__ is not {name}_kind:",
            f"        op.check({_call(op)})",
            f"    {name}_key = {name}.{part.key}",
            *(f"    {name}_{x}_ptr = {name}.{x}.data_ptr()" for x in part.tensors),
        ], [f"{name}_key"]
    if name not in op.tensors:
        return [], [] if name in op.unkeyed else [name]
    if name in op.required:
        lines = [f"{name}_ptr = {name}.data_ptr()"]
        return ([*lines, key], [f"{name}_key"]) if compared else (lines, layout)
    mixed = name in op.mixed
    return [
        f"if {name} is None" + (f" or not isinstance({name}, Tensor):" if mixed else ":"),
        f"    {name}_ptr = 0",
        f"    {name}_key = {name if mixed else None}",
        "else:",
        f"    {name}_ptr = {name}.data_ptr()",
        f"    {key}",
    ], [f"{name}_key"]


def _overlap(op: Operator[Any]) -> list[str]:
    """Compare spans; where two meet, `look_closer` does so, once for these addresses."""
    if not op.pairs:
        return []
    names = [_var(name) for name in op.tensors]
    lines = [f"{', '.join(f'{name}_bytes' for name in names)}, = _spans"]
    tests = []
    for mine in dict.fromkeys(mine for mine, _, _ in op.pairs):
        lines.append(f"{mine}_end = {mine}_ptr + {mine}_bytes")
        for _, other, may in (pair for pair in op.pairs if pair[0] == mine):
            y = _var(other)
            test = f"{y}_ptr < {mine}_end and {mine}_ptr < {y}_ptr + {y}_bytes"
            if may:
                test += f" and not ({mine}_ptr == {y}_ptr and {mine}_key == {y}_key)"
            tests.append(f"({test})")
    meet = ["if (", *(f"    {'or ' if at else ''}{test}" for at, test in enumerate(tests)), "):"]
    known = f"({', '.join(f'{name}_ptr' for name in names)},)"
    look = f"_own.look_closer({_call(op)}, _spans, _apart, {known})"
    lines += [*meet, f"    if {known} not in _apart:", f"        {look}"]
    if op.changed:
        return lines
    given = " or ".join(f"{name} is not None" for name in op.results)
    return [f"if {given}:", *_indented(lines)]


def _launch(op: Operator[Any]) -> list[str]:
    """The launch and what the call returns."""
    call, results = _call(op), ", ".join(op.results) or "None"
    addresses = {name: f"{_var(name)}_ptr" for name in op.tensors} | {
        "0": "0", "stream": "_stream", "workspace": "_workspace", "scratch": "_scratch"
    }  # fmt: skip
    behind = [] if op.prepare else ["*_numbers"]
    order = list(op.arguments) or ["stream", *op.tensors]

    def launch(*more: str) -> str:
        return f"_launch({', '.join([*(addresses[name] for name in (*order, *more)), *behind])})"

    lines = []
    if "scratch" in order:
        lines += [
            "_scratch = 0",
            "if _scratch_bytes:",
            f"    _room = {op.anchor}.new_empty(_scratch_bytes + 256, dtype=uint8)",
            "    _scratch = -(-_room.data_ptr() // 256) * 256",
        ]
    pointer = "_workspace = _own.workspaces.pointer(_stream, _needed)"
    if "workspace" in order:  # the caller's, or one that the stream has
        lines += [
            "_workspace = 0",
            "if workspace is not None:",
            f"    _workspace = _own.check_workspace({call}, _needed)",
            "elif _needed:",
            f"    {pointer}",
            *_discarding(launch()),
        ]
    elif op.workspace is not None:  # passed where one is needed
        with_it = [pointer, *_discarding(launch("workspace"))]
        lines += ["if _needed:", *_indented(with_it), "else:", f"    {launch()}"]
    else:
        lines.append(launch())
    if op.empty is None:
        return ["if _launch is not None:", *_indented(lines), f"return {results}"]
    filled = ["if _launch is None:", f"    op.empty({call})", f"    return {results}"]
    return [*filled, *lines, f"return {results}"]


def _discarding(launch: str) -> list[str]:
    """A launch; if it fails, the stream's counters are dropped, as they may not be zero."""
    return [
        "try:",
        f"    {launch}",
        "except BaseException:",
        "    _own.workspaces.discard(_stream)",
        "    raise",
    ]
