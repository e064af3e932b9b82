"""What an executor answers, looked at before anything relies on it."""

from __future__ import annotations

from collections.abc import Sequence

from smkern.errors import ModelError
from smkern.limits import shown
from smkern.runtime.device import Work
from smkern.runtime.executor import Draw, Executor, PrefillChunk, PrefillRun
from smkern.runtime.request import Request


def begun_batch(executor: Executor, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
    """`Executor.begin`; ModelError for a batch of anything else."""
    run = executor.begin(chunks, slot)
    if not isinstance(run, PrefillRun) or (run.slot, run.chunks) != (slot, tuple(chunks)):
        raise _vain("begin", run, f"a PrefillRun of its {len(chunks)} chunks in slot {slot}")
    return run


def layers_of(executor: Executor, run: PrefillRun, first: int, count: int) -> Work:
    """`Executor.prefill`; ModelError for a last layer that does not draw for those that draw."""
    work = executor.prefill(run, first, count)
    if first + count == executor.config.num_layers:
        drawing = tuple([chunk.request for chunk in run.chunks if chunk.draws])
        if (drawing or run.draw is not None) and (
            not isinstance(run.draw, Draw) or run.draw.requests != drawing
        ):
            raise _vain("prefill", run.draw, f"a Draw of {list(drawing)} in run.draw")
    return work


def decode_steps(
    executor: Executor,
    requests: Sequence[Request],
    steps: int,
    rows: tuple[Request, ...] | None = None,
) -> list[tuple[Work, Draw]]:
    """`Executor.decode`; ModelError for another number of steps, or of other requests.

    Args:
        executor, requests, steps: As there.
        rows: The requests by row, where these go on as they were.
    """
    works = executor.decode(requests, steps)
    if rows is None:
        rows = works[0][1].requests
        if len(rows) != len(requests) or {*rows} != {*requests}:
            raise _vain("decode", rows, f"rows of {list(requests)}")
    for _, draw in works:
        if draw.requests is not rows and draw.requests != rows:
            raise _vain("decode", works, f"{steps} steps of the same rows")
    if len(works) != steps:
        raise _vain("decode", works, f"{steps} steps")
    return works


def mixed_forward(
    executor: Executor, chunks: Sequence[PrefillChunk], requests: Sequence[Request]
) -> tuple[Work, Draw]:
    """`Executor.mixed`; ModelError for a draw of others."""
    work, draw = executor.mixed(chunks, requests)
    drawing = [chunk.request for chunk in chunks if chunk.draws]
    first, others = draw.requests[: len(drawing)], draw.requests[len(drawing) :]
    if list(first) != drawing or len(others) != len(requests) or {*others} != {*requests}:
        raise _vain("mixed", draw.requests, f"{drawing}, then {list(requests)}")
    return work, draw


def tokens_error(tokens: Sequence[int], rows: int) -> ModelError | None:
    """What is wrong with what `Draw.read` answered for so many rows: no token a row, or none that
    could be. A sum of 128 takes half a microsecond, a look at each of them ten times that."""
    try:
        is_right = len(tokens) == rows and type(sum(tokens)) is int
    except TypeError:
        is_right = False
    return None if is_right else _vain("read", tokens, f"a list of {rows} whole numbers")


def _vain(call: str, answer: object, wanted: str) -> ModelError:
    return ModelError(f"{call}() of the executor answered {shown(answer)}: let it return {wanted}")
