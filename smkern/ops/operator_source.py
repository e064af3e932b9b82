"""The eager path of a declared operator as Python source, so that a call interprets nothing.

Two functions are made of one body. `eager(state, *fields)` runs a call on the device whose `state`
(`EagerOperator.state`) it is given; `entry(*fields)` first leaves to `elsewhere` whatever is not
plain tensors of a GPU outside torch's modes, and finds the state by the device. The source is kept
for tracebacks.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.ops.operator import Operator

TENSORS = frozenset({Tensor, Parameter})
OPTIONAL = TENSORS | {NoneType}
PLAIN = OPTIONAL | {int, float, bool}
"""Classes of what a call may hold without torch's dispatcher being asked."""
_FEW_PAIRS = 8
"""Pairs up to which comparing spans costs less than looking the addresses up."""


def eager_function(op: Operator[Any]) -> Callable[..., Any]:
    """`eager(state, *fields)` of an operator."""
    lines = [f"def eager(state, {', '.join(op.call._fields)}):", *_indented(_body(op))]
    return _compiled(op, "eager", lines, {})


def entry_function(
    op: Operator[Any], states: Mapping[int, Any], elsewhere: Callable[..., Any]
) -> Callable[..., Any]:
    """`entry(*fields)` of an operator.

    Args:
        op: The operator.
        states: By the device's index.
        elsewhere: (op, call) for what the GPU's path does not take.
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
        f"    state = states[{op.anchor}.get_device()]",
        *_indented(_body(op)),
    ]
    given = {"states": states, "elsewhere": elsewhere}
    return _compiled(op, "entry", lines, given)


def _compiled(
    op: Operator[Any], kind: str, lines: list[str], given: dict[str, Any]
) -> Callable[..., Any]:
    name, source = f"<smkern {kind} path of {op.name}>", "\n".join(lines) + "\n"
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
    """From the state of a device to the result."""
    call, with_key = _call(op), {name for pair in op.in_place for name in pair}
    lines = [
        "index, current_device, current_stream, budget_of, find, own = state",
        "if current_device() != index:",
        f"    return own.on_device({call})",
        "stream = current_stream(index)",
        "budget = budget_of(stream, index)",
    ]
    key: list[str] = []
    for name in op.call._fields:
        found, parts = _address(op, name, name in with_key)
        lines += found
        key += parts
    aligned = " | ".join(f"{name}_ptr" for name in op.vectors) or "0"
    lines += [
        f"aligned = not ({aligned}) & 15",
        f"key = ({', '.join(key)}, num_sms.__class__, budget.num_sms, budget.confined, "
        "budget.clusters, aligned)",
        "try:",
        "    record = find(key)",
        "except TypeError:",
        "    record = None",
        "if record is None:",
        f"    record = own.prepare(key, {call}, budget, aligned)",
        "launch, numbers, needed, scratch_bytes, shapes, spans, apart = record",
    ]
    lines += _overlap(op, with_key)
    if op.check_memory is not None:
        lines += ["if check:", f"    own.check_memory({call})"]
    for at, name in enumerate(op.results):
        wanted = f" and shapes[{at}] is not None" if name in op.left_out else ""
        new = f"{op.anchor}.new_empty"
        lines += [
            f"if {name} is None{wanted}:",
            f"    shape, dtype = shapes[{at}]",
            f"    same = dtype is {op.anchor}.dtype",
            f"    {name} = {new}(shape) if same else {new}(shape, dtype=dtype)",
            f"    {name}_ptr = {name}.data_ptr()",
        ]
    return [*lines, *_launch(op)]


def _address(op: Operator[Any], name: str, with_key: bool) -> tuple[list[str], list[str]]:
    """Statements that find a field's addresses, and what of it chooses a record."""
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
        return ([*lines, key], [f"{name}_key"]) if with_key else (lines, layout)
    absent = [f"    {name}_ptr = 0", f"    {name}_key = {name if name in op.mixed else 'None'}"]
    present = [f"    {name}_ptr = {name}.data_ptr()", f"    {key}"]
    test = f"{name} is None"
    if name in op.mixed:
        test += f" or not isinstance({name}, Tensor)"
    return [f"if {test}:", *absent, "else:", *present], [f"{name}_key"]


def _overlap(op: Operator[Any], with_key: set[str]) -> list[str]:
    """Whether spans meet; where they do, `own.check_overlap` looks closer, once an address."""
    if not op.pairs:
        return []
    spans = [f"{_var(name)}_bytes" for name in op.tensors]
    addresses = f"({', '.join(f'{_var(name)}_ptr' for name in op.tensors)},)"
    lines = [f"{', '.join(spans)}, = spans"]
    tests, ends = [], []
    for mine in dict.fromkeys(mine for mine, _, _ in op.pairs):
        ends.append(f"{_var(mine)}_end = {_var(mine)}_ptr + {_var(mine)}_bytes")
        for _, name, may in (pair for pair in op.pairs if pair[0] == mine):
            x, y = _var(mine), _var(name)
            test = f"{y}_ptr < {x}_end and {x}_ptr < {y}_ptr + {y}_bytes"
            if may and mine in with_key:
                test += f" and not ({x}_ptr == {y}_ptr and {x}_key == {y}_key)"
            tests.append(f"({test})")
    look = ["if (", *(f"    {'or ' if at else ''}{test}" for at, test in enumerate(tests)), "):"]
    if len(op.pairs) > _FEW_PAIRS:
        return [f"if {addresses} not in apart:", *_indented([
            *lines, *ends, *look,
            f"    own.check_overlap({_call(op)})",
            f"own.remember(apart, {addresses})",
        ])]  # fmt: skip
    inner = [
        f"    if {addresses} not in apart:",
        f"        own.check_overlap({_call(op)})",
        f"        own.remember(apart, {addresses})",
    ]
    lines = [*lines, *ends, *look, *inner]
    if set(op.changed):
        return lines
    given = " or ".join(f"{name} is not None" for name in op.results)
    return [f"if {given}:", *_indented(lines)]


def _launch(op: Operator[Any]) -> list[str]:
    """The launch and what the call returns."""
    results = ", ".join(op.results) if op.results else "None"
    call, lines = _call(op), []
    if op.empty is not None:
        lines += ["if launch is None:", f"    op.empty({call})", f"    return {results}"]
    run: list[str] = []
    names = {**{name: f"{_var(name)}_ptr" for name in op.tensors}, "0": "0", "stream": "stream"}
    usual = ", ".join(("stream", *(names[name] for name in op.tensors)))
    if op.arguments:
        given = ", ".join(names.get(name, name) for name in op.arguments)
        if "scratch" in op.arguments:
            run += [
                "scratch = 0",
                "if scratch_bytes:",
                f"    room = {op.anchor}.new_empty(scratch_bytes + 256, dtype=uint8)",
                "    scratch = -(-room.data_ptr() // 256) * 256",
            ]
        with_workspace = [f"launch({given})"]
        needs = "workspace" in op.arguments
        if needs:
            run += [
                "if workspace is not None:",
                f"    workspace = own.check_workspace({call}, needed)",
                "else:",
                "    workspace = own.workspaces.pointer(stream, needed) if needed else 0",
            ]
        else:
            run += with_workspace
    else:
        needs = op.workspace is not None
        if not needs:
            run += [f"launch({usual}, *numbers)"]
        else:
            run += ["workspace = own.workspaces.pointer(stream, needed) if needed else 0"]
            with_workspace = [
                "if needed:",
                f"    launch({usual}, workspace, *numbers)",
                "else:",
                f"    launch({usual}, *numbers)",
            ]
    if needs:
        run += [
            "try:", *_indented(with_workspace),
            "except BaseException:", "    own.workspaces.discard(stream)", "    raise",
        ]  # fmt: skip
    if op.empty is None:
        run = ["if launch is not None:", *_indented(run)]
    return [*lines, *run, f"return {results}"]
