"""A declared operator run: a look-up and the launch on a device, the reference on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Generic, NamedTuple

import torch

from smkern.ops import checks
from smkern.ops.aliasing import check_disjoint, check_overlap, span_bytes
from smkern.ops.bounded_cache import keep
from smkern.ops.operator import Bound, Operator, Shapes
from smkern.ops.operator_check import check_kinds, check_operator, check_written
from smkern.ops.operator_dispatch import Launch, P
from smkern.ops.operator_source import eager_function
from smkern.ops.streams import Streams, runtime_streams
from smkern.ops.workspace import Workspaces, check_workspace, scratch_of_streams

_MAX_APART = 128
"""Calls that a record remembers by their addresses: a model has as many as layers, and the spans of
most never meet."""


class Record(NamedTuple):
    """A validated combination of numbers with its launch; `launch` is None where nothing runs.

    `spans` are the bytes that each of `Operator.tensors` spans. `apart` holds the addresses, in
    that order, of calls that passed the closer look: spans meet, and no address is shared; and how
    far from each other tensors were that passed it.
    """

    launch: Launch | None
    numbers: tuple[Any, ...]
    workspace_bytes: int
    scratch_bytes: int
    shapes: Shapes
    spans: tuple[int, ...]
    apart: set[tuple[Any, ...]]


class EagerOperator(Generic[P]):
    """Launches one operator on one device.

    Args:
        workspaces: The device's workspaces; None where `op` needs none.
    """

    def __init__(
        self,
        op: Operator[P],
        index: int,
        dispatcher: Any,
        streams: Streams,
        workspaces: Workspaces | None = None,
    ) -> None:
        self.op, self.index = op, index
        self.dispatcher, self.streams = dispatcher, streams
        self._workspaces = workspaces
        self._pairs = [(op.tensors.index(x), op.tensors.index(y)) for x, y, _ in op.pairs]
        self.records: dict[Any, Record] = {}
        self.state = (
            index, streams.current_device, streams.current_stream, streams.budget,
            self.records.get, self,
        )  # fmt: skip
        self._run = eager_function(op)

    @property
    def workspaces(self) -> Workspaces:
        """The workspaces of this device."""
        assert self._workspaces is not None
        return self._workspaces

    def __call__(self, call: Any) -> Any:
        """Run a call and return its result, a tuple of several, or None without any."""
        return self._run(self.state, *call)

    def on_device(self, call: Any) -> Any:
        """Run a call whose device is not the current one."""
        with torch.cuda.device(self.index):
            return self(call)

    def prepare(self, key: Any, call: Any, stream_budget: Any, aligned: bool) -> Record:
        """Validate a combination of numbers and prepare its launch; keep it."""
        op, capturing = self.op, self.streams.capturing()
        shapes = check_operator(op, call)
        info = self.dispatcher.profile.info
        checks.check_capability(op.device_of(call), info.capability)
        budget = checks.resolve_budget(call.num_sms, stream_budget, info.num_sms)
        problem = op.problem(call, aligned)
        bound = Bound(None)
        if problem is not None:
            bound = (op.prepare or self._bind)(self.dispatcher, call, problem, budget, capturing)
        spans = tuple(span_bytes(op.tensor_of(call, name)) for name in op.tensors)
        record = Record(*bound, shapes, spans, set())
        if op.kept_in_capture or not capturing:
            keep(self.records, key, record)
        return record

    def _bind(self, dispatcher: Any, call: Any, problem: P, budget: Any, capturing: bool) -> Bound:
        op = self.op
        launch = dispatcher.launch(problem, budget, capturing=capturing)
        numbers = op.numbers(with_results(op, call, op.shapes(call)))
        return Bound(launch, numbers, op.workspace(problem) if op.workspace else 0)

    def refuse(self, call: Any) -> None:
        """Raise ArgumentError for a call of which not even a key could be made."""
        check_kinds(self.op, call)
        check_operator(self.op, call)

    def look_closer(
        self, call: Any, spans: tuple[int, ...], apart: set[tuple[Any, ...]], at: tuple[int, ...]
    ) -> None:
        """Raise ArgumentError where something written shares an address with something else.

        Whether tensors do follows from how far apart they are, which is the same in all layers of a
        model: few calls are looked at, and none at these addresses again.

        Args:
            call: A call, two of whose spans meet.
            spans, apart: Of its record.
            at: Its tensors' addresses.
        """
        met = tuple(
            [
                (x, y, at[y] - at[x])
                for x, y in self._pairs
                if at[y] < at[x] + spans[x] and at[x] < at[y] + spans[y]
            ]
        )
        if met not in apart:
            check_overlap(self.op, call)
        if len(apart) >= _MAX_APART:
            apart.clear()
        apart.update((met, at))

    def check_workspace(self, call: Any, num_bytes: int) -> int:
        """The address of a caller's workspace, checked."""
        op = self.op
        address = check_workspace(call.workspace, num_bytes, op.device_of(call))
        check_disjoint(op, call)
        return address

    def check_memory(self, call: Any) -> None:
        """Look at what a checked call's tensors hold."""
        checks.check_uncaptured(self.streams.capturing())
        assert self.op.check_memory is not None
        self.op.check_memory(call)


def with_results(op: Operator[Any], call: Any, shapes: Shapes) -> Any:
    """The call, with results that hold nothing for those that it was not given."""
    made = {
        name: torch.empty(found[0], dtype=found[1], device="meta")
        for name, found in zip(op.results, shapes, strict=True)
        if found is not None and getattr(call, name) is None
    }
    return call._replace(**made)


def run_on_cpu(op: Operator[Any], call: Any) -> Any:
    """The reference, with the checks that the GPU path makes.

    A budget only has to be a whole number of at least 1, as there is no device to exceed.
    """
    check_operator(op, call)
    if call.num_sms is not None:
        checks.as_num_sms(call.num_sms)
    check_written(op, call)
    check_overlap(op, call)
    if op.check_memory is not None and call.check:
        op.check_memory(call)
    with torch.no_grad():
        found = op.reference(call)
    if not op.results:
        return None
    made = found if isinstance(found, tuple) else (found,)
    results = []
    for x, new in zip(op.results_of(call), made, strict=True):
        results.append(new if x is None or x is new else x.copy_(new))
    return results[0] if len(results) == 1 else tuple(results)


def run_here(op: Operator[Any], call: Any) -> Any:
    """On the device of a call, or by the reference on the CPU."""
    device = op.device_of(call)
    if device.type == "cuda":
        return eager_operator(op, device.index)(call)
    return run_on_cpu(op, call)


@cache
def eager_operator(op: Operator[Any], index: int) -> EagerOperator[Any]:
    """The eager path of an operator on a device, made at its first call, kept for the process."""
    return EagerOperator(op, index, op.dispatcher(index), runtime_streams(), workspaces_of(index))


class _States(dict[int, Any]):
    """The eager paths' states of one operator by device, each made at its first call."""

    def __init__(self, op: Operator[Any]) -> None:
        super().__init__()
        self._op = op

    def __missing__(self, index: int) -> Any:
        state = self[index] = eager_operator(self._op, index).state
        return state


@cache
def states_of(op: Operator[Any]) -> Mapping[int, Any]:
    """`EagerOperator.state` of an operator, by the device's index."""
    return _States(op)


@cache
def workspaces_of(index: int) -> Workspaces:
    """Scratch memory of a device's operators: those of one stream follow each other."""
    from smkern.partition.streams import stream_budgets

    workspaces = Workspaces(
        torch.device("cuda", index), runtime_streams().capturing, shared=scratch_of_streams(index)
    )
    # a partition that closes must not find our workspace among its stream's live tensors
    stream_budgets(index).at_close(workspaces.discard)
    return workspaces
