"""Tokens that launches drew, handed to their requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smkern.errors import ModelError, RequestError
from smkern.runtime.live import Live, Output


def deliver(
    rows: Iterable[tuple[Live, int]], tokens: Sequence[int], now_us: float
) -> tuple[list[Output], list[Live]]:
    """Hand a token to each request that a launch drew for.

    A request that ended, or began anew, since the launch gets none. One that draws again what it
    had drawn before it began anew emits nothing.

    Args:
        rows: A request and its epoch at the launch, by row.
        tokens: By row.
        now_us: When they were read.

    Returns:
        The outputs, and the requests that are finished by them.
    """
    outputs: list[Output] = []
    finished: list[Live] = []
    for (live, epoch), token in zip(rows, tokens, strict=False):
        if live.epoch != epoch or live.stage == "done":
            continue
        live.ahead -= 1
        live.token_us = now_us
        request = live.request
        if live.again:
            if not _draws_again(live, token):
                finished.append(live)
            continue
        # What most tokens are: neither text nor an end. 128 of them are handed out a step.
        if request.stream is None and token not in request.stop_token_ids:
            ids = request.ids
            ids.append(token)
            if len(ids) - request.prompt_len < request.max_new_tokens:
                outputs.append(Output(live.id, token))
                continue
            ids.pop()
        try:
            piece = request.accept(token)
        except Exception as reason:  # noqa: BLE001  a tokenizer's, which may raise anything
            live.error = RequestError(
                f"{request}: its tokenizer raised {type(reason).__name__} at the text of token "
                f"{token}: {reason}"
            )
            finished.append(live)
            continue
        live.completion = piece.completion
        outputs.append(Output(live.id, token, piece.text, piece.completion))
        if piece.completion is not None:
            finished.append(live)
    return outputs, finished


def _draws_again(live: Live, token: int) -> bool:
    """Take a token that was emitted before; False, with its error, where it is another one."""
    expected = live.again.pop(0)
    position = len(live.request.ids)
    live.request.ids.append(expected)
    if token == expected:
        return True
    live.error = ModelError(
        f"request {live.id} was computed again and drew {token} at position {position}, where it "
        f"had drawn {expected}: the model is not batch-invariant; pass preemption='keep'"
    )
    return False
