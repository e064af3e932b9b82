"""Texts in and out, and stop texts, on the simulated GPU."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from smkern.models import SamplingParams
from smkern.models.tokenizer import Detokenizer
from smkern.policies import Chunked, StaticSplit
from smkern.runtime.request import Request
from tests.models.generation import Letters, Torn
from tests.runtime.world import World


def test_texts_in_and_out() -> None:
    world = World(tokenizer=Letters(), end_probability=0.0)
    handle = world.mux.submit("hello")
    outputs = list(world.mux.run())
    assert handle.completion is not None
    assert "".join(output.text or "" for output in outputs) == handle.completion.text
    assert [output.token for output in outputs] == list(handle.tokens)


def test_a_stop_text_ends_a_request_inside_a_look_ahead() -> None:
    """The host alone knows of it; what was launched meanwhile never comes out."""
    free = World(StaticSplit(48, steps=6), tokenizer=Letters(), end_probability=0.0)
    handle = free.submit([1, 2, 3], 30, seed=5)
    free.finish()
    assert handle.completion is not None
    text = handle.completion.text
    assert text is not None
    stop = text[4:6]
    world = World(StaticSplit(48, steps=6), tokenizer=Letters(), end_probability=0.0)
    stopped = world.mux.submit([1, 2, 3], _stopping(free.handles[0]._request, stop))
    outputs = list(world.mux.run())
    assert stopped.completion is not None
    assert stopped.completion.finish_reason == "stop"
    assert stopped.completion.text == text[: text.index(stop)]
    assert stopped.tokens == handle.tokens[: len(stopped.tokens)]
    assert len(outputs) == len(stopped.tokens)
    assert world.executor.pool.poll() == 0
    assert world.executor.pool.usage.held == 0


def test_a_stop_text_in_the_last_token_is_why_a_request_ends() -> None:
    """Beside half a character, so that it comes out at the end alone."""
    detokenizer = Detokenizer(Torn(b"ab", b"cEND\xe2\x80"), [0], ("END",))
    request = Request(0, SamplingParams(1), 0, frozenset(), 1, array("q", [0]), 1, detokenizer)
    text, completion = request.accept(1)
    assert completion is not None
    assert (text, completion.text, completion.finish_reason) == ("c", "c", "stop")


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "keep"])
def test_texts_of_requests_that_begin_anew(preemption: Any, batch_invariant: bool) -> None:
    """Nothing is said twice, and stop texts end them all the same."""
    free = World(Chunked(), tokenizer=Letters(), end_probability=0.0)
    wanted = []
    for id_ in range(4):
        handle = free.submit([id_] * 10, 30, seed=id_)
        free.finish()
        assert handle.completion is not None
        wanted.append(handle.completion.text or "")
    stops = [text[8:10] for text in wanted]
    stops[0] = stops[2] = "never said"
    world = World(
        StaticSplit(48, steps=3), tokenizer=Letters(), end_probability=0.0, num_pages=16,
        page_size=4, preemption=preemption, batch_invariant=batch_invariant,
    )  # fmt: skip
    handles = [
        world.mux.submit([id_] * 10, _stopping(free.handles[id_]._request, stop))
        for id_, stop in enumerate(stops)
    ]
    said = dict.fromkeys(range(4), "")
    for output in world.mux.run():
        said[output.id] += output.text or ""
    assert world.mux.stats().preemptions
    for handle, text, stop in zip(handles, wanted, stops, strict=True):
        assert handle.completion is not None
        assert handle.completion.text == said[handle.id] == text.split(stop)[0]


def _stopping(request: Request, text: str) -> Any:
    return replace(request.params, stop=text)
