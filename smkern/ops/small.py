"""A frame for small operators: all that a family would otherwise spell out in eight files.

A family declares a `Small` for each of its operators and calls `run` with a call of it:

    class Scale(NamedTuple):               # the arguments in the schema's order, the results
        x: Any                             # (None: to be made), `num_sms` last
        by: Any
        out: Any = None
        num_sms: Any = None

    SCALE = Small(
        name="scale", call=Scale, schema="Tensor x, *, float by=1.0", results=("out",),
        check=check_scale,                 # raises ArgumentError; sees no address
        shapes=lambda call: ((call.x.shape, call.x.dtype),),  # of each result
        problem=problem_of_scale,          # (call, aligned) -> what chooses kernels; None: no work
        numbers=lambda call: (call.x.stride(0), call.by),  # behind the addresses of the launch
        reference=lambda call: reference.scale(call.x, call.by),
        dispatcher=scale_dispatcher,       # cached: index -> SmallDispatcher (small_dispatch.py)
        vectors=("x", "out"),              # their addresses decide `aligned`
    )
    LIBRARY = register(SCALE)              # small_library.py: torch.ops.smkern.scale, scale_out

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
from functools import cache
from types import NoneType
from typing import Any, Generic

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.ops import validate
from smkern.ops.aliasing import span_bytes
from smkern.ops.eager import Streams, runtime_streams
from smkern.ops.kept import MAX_CACHED, keep
from smkern.ops.small_check import Shapes, check_pair, check_small
from smkern.ops.small_dispatch import Launch, P, SmallDispatcher
from smkern.ops.workspace import Workspaces

_TENSOR = re.compile(r"Tensor(\(\w+!\))?\??$")
_TENSORS = frozenset({Tensor, Parameter})
_PLAIN = _TENSORS | {NoneType, int, float, bool, str}
_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def _no_workspace(problem: Any, budget: Any) -> int:
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class Small(Generic[P]):
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
    dispatcher: Callable[[int], SmallDispatcher[P, Any]]
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


class EagerSmall(Generic[P]):
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
        op: Small[P],
        index: int,
        dispatcher: SmallDispatcher[P, Any],
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
            if x.__class__ in _TENSORS or (x.__class__ not in _PLAIN and isinstance(x, Tensor)):
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
        shapes = check_small(op, call)
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


def with_results(op: Small[Any], call: Any, shapes: Shapes, device: Any = None) -> Any:
    """The call with the results made that it does not bring."""
    made = {
        name: torch.empty(shape, dtype=dtype, device=device or call[0].device)
        for name, (shape, dtype) in zip(op.results, shapes, strict=True)
        if getattr(call, name) is None
    }
    return call._replace(**made)


def run_on_cpu(op: Small[Any], call: Any) -> Any:
    """The reference, with the checks that the GPU path makes; a budget only has to be positive."""
    check_small(op, call)
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


def run_here(op: Small[Any], call: Any) -> Any:
    """On the device of the first argument, or by the reference on the CPU."""
    if call[0].is_cuda:
        return eager_small(op, call[0].get_device())(call)
    return run_on_cpu(op, call)


def run(op: Small[Any], call: Any) -> Any:
    """Directly where plain tensors meet no mode, else by torch's dispatcher."""
    if not (_is_compiling() or _num_modes() or _transform() is not None):
        for at in op.places:
            if call[at].__class__ not in _PLAIN:
                break
        else:
            first = call[0]
            if not isinstance(first, Tensor):
                check_small(op, call)  # which refuses it
            if first.is_cuda:
                return eager_small(op, first.get_device())(call)
            if first.device.type == "cpu":
                return run_on_cpu(op, call)
    from smkern.ops.small_library import through_library

    return through_library(op, call)


@cache
def eager_small(op: Small[Any], index: int) -> EagerSmall[Any]:
    """The eager path of an operator on a device, made at its first call, kept for the process."""
    streams = runtime_streams()
    return EagerSmall(op, index, op.dispatcher(index), streams, _workspaces(index))


@cache
def _workspaces(index: int) -> Workspaces:
    """Scratch memory of the small operators on a device: those of one stream follow each other."""
    from smkern.partition.streams import stream_budgets

    workspaces = Workspaces(torch.device("cuda", index), runtime_streams().capturing)
    # a partition that closes must not find our workspace among its stream's live tensors
    stream_budgets(index).at_close(workspaces.discard)
    return workspaces
