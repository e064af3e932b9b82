"""A small operator run: a look-up and the launch on a device, the reference on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import NoneType
from typing import Any, Generic

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.ops import validate
from smkern.ops.aliasing import span_bytes
from smkern.ops.bounded_cache import MAX_CACHED, keep
from smkern.ops.operator import Operator, Shapes
from smkern.ops.operator_check import check_operator, check_pair
from smkern.ops.operator_dispatch import Launch, OperatorDispatcher, P
from smkern.ops.streams import Streams, runtime_streams
from smkern.ops.workspace import Workspaces, scratch_of_streams

TENSORS = frozenset({Tensor, Parameter})
PLAIN = TENSORS | {NoneType, int, float, bool, str}
"""Classes of what a call may hold without torch's dispatcher being asked."""


@dataclass(frozen=True, slots=True)
class Record:
    """A validated combination of numbers with its launch; `launch` is None where nothing runs.

    `spans` are bytes, one a field of the call; `apart` are (field, field, bytes between) of tensors
    whose spans meet and that share no address.
    """

    launch: Launch | None
    shapes: Shapes
    spans: tuple[int, ...]
    numbers: tuple[Any, ...]
    workspace_bytes: int
    apart: set[tuple[int, int, int]] = field(default_factory=set)


class EagerOperator(Generic[P]):
    """Launches one operator on one device.

    Args:
        op: The operator.
        index: The device's index.
        dispatcher: Chooses and prepares launches.
        streams: The current stream and its budget.
        workspaces: Gives each stream and capture its own; None where `op` needs none.
    """

    def __init__(
        self,
        op: Operator[P],
        index: int,
        dispatcher: OperatorDispatcher[P, Any],
        streams: Streams,
        workspaces: Workspaces | None = None,
    ) -> None:
        self.op, self.index = op, index
        self.dispatcher, self.streams = dispatcher, streams
        self._workspaces = workspaces
        self._records: dict[Any, Record] = {}

    def __call__(self, call: Any) -> Any:
        """Run a call: its result, a tuple of several, None without any."""
        op, index, streams = self.op, self.index, self.streams
        if streams.current_device() != index:
            with torch.cuda.device(index):
                return self(call)
        stream = streams.current_stream(index)
        budget = streams.budget(stream, index)
        pointers: list[int] = []
        kinds: list[Any] = []
        for x in call:
            if x.__class__ in TENSORS or (x.__class__ not in PLAIN and isinstance(x, Tensor)):
                pointers.append(x.data_ptr())
                kinds.append((x.shape, x.stride(), x.dtype, x.get_device()))
            else:
                pointers.append(0)
                kinds.append(x)
        low = 0
        for at in op.aligned_at:
            low |= pointers[at]
        aligned = low & 15 == 0
        key = (
            *kinds, call[-1].__class__, budget.num_sms, budget.confined, budget.clusters, aligned,
        )  # fmt: skip
        try:
            record = self._records.get(key)
        except TypeError:
            record = None
        if record is None:
            record = self._prepare(key, call, budget, aligned)
        spans = record.spans
        for pair in op.pairs:
            mine, other, may = pair
            begin, at = pointers[mine], pointers[other]
            if begin < at + spans[other] and at < begin + spans[mine]:
                if may and begin == at and kinds[mine] == kinds[other]:
                    continue
                meeting = (mine, other, at - begin)
                if meeting not in record.apart:
                    check_pair(op, call, pair)
                    if len(record.apart) >= MAX_CACHED:
                        record.apart.clear()
                    record.apart.add(meeting)
        for at in op.results_at:
            if call[at] is None:
                call = with_results(op, call, record.shapes)
                for place in op.results_at:
                    pointers[place] = call[place].data_ptr()
                break
        if record.launch is not None:
            addresses = [pointers[at] for at in op.places]
            if record.workspace_bytes:
                self._launch_with_workspace(record, stream, addresses)
            else:
                record.launch(stream, *addresses, *record.numbers)
        return op.returned(call)

    def prepare(self, call: Any, budget: Any, aligned: bool, capturing: bool) -> Record:
        """Validate a combination of numbers and prepare its launch."""
        op = self.op
        shapes = check_operator(op, call)
        info = self.dispatcher.profile.info
        validate.check_capability(call[0].device, info.capability)
        budget = validate.resolve_budget(call[-1], budget, info.num_sms)
        problem = op.problem(call, aligned)
        launch, numbers, needed = None, (), 0
        spans = tuple(span_bytes(x) if isinstance(x, Tensor) else 0 for x in call)
        if problem is not None:
            launch = self.dispatcher.launch(problem, budget, capturing=capturing)
            numbers = op.numbers(with_results(op, call, shapes, "meta"))
            needed = op.workspace(problem, budget)
        return Record(launch, shapes, spans, numbers, needed)

    def _prepare(self, key: Any, call: Any, budget: Any, aligned: bool) -> Record:
        record = self.prepare(call, budget, aligned, self.streams.capturing())
        keep(self._records, key, record)
        return record

    def _launch_with_workspace(self, record: Record, stream: int, pointers: list[int]) -> None:
        workspaces = self._workspaces
        assert workspaces is not None
        assert record.launch is not None
        workspace = workspaces.pointer(stream, record.workspace_bytes)
        try:
            record.launch(stream, *pointers, workspace, *record.numbers)
        except BaseException:
            workspaces.discard(stream)
            raise


def with_results(op: Operator[Any], call: Any, shapes: Shapes, device: Any = None) -> Any:
    """The call with the results made that it does not bring."""
    made = {
        name: torch.empty(shape, dtype=dtype, device=device or call[0].device)
        for name, (shape, dtype) in zip(op.results, shapes, strict=True)
        if getattr(call, name) is None
    }
    return call._replace(**made)


def run_on_cpu(op: Operator[Any], call: Any) -> Any:
    """The reference, with the checks that the GPU path makes; a budget only has to be positive."""
    check_operator(op, call)
    if call[-1] is not None:
        validate.as_num_sms(call[-1])
    for pair in op.pairs:
        check_pair(op, call, pair)
    with torch.no_grad():
        found = op.reference(call)
    if not op.results:
        return None
    made = found if isinstance(found, tuple) else (found,)
    results = []
    for x, new in zip(op.results_of(call), made, strict=True):
        results.append(new if x is None else x.copy_(new))
    return results[0] if len(results) == 1 else tuple(results)


def run_here(op: Operator[Any], call: Any) -> Any:
    """On the device of the first argument, or by the reference on the CPU."""
    if call[0].is_cuda:
        return eager_operator(op, call[0].get_device())(call)
    return run_on_cpu(op, call)


@cache
def eager_operator(op: Operator[Any], index: int) -> EagerOperator[Any]:
    """The eager path of an operator on a device, made at its first call, kept for the process."""
    streams = runtime_streams()
    return EagerOperator(op, index, op.dispatcher(index), streams, _workspaces(index))


@cache
def _workspaces(index: int) -> Workspaces:
    """Scratch memory of the small operators on a device: those of one stream follow each other."""
    from smkern.partition.streams import stream_budgets

    workspaces = Workspaces(
        torch.device("cuda", index), runtime_streams().capturing, shared=scratch_of_streams(index)
    )
    # a partition that closes must not find our workspace among its stream's live tensors
    stream_budgets(index).at_close(workspaces.discard)
    return workspaces
