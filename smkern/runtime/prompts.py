"""Prompts of a call, and the params of each."""

from __future__ import annotations

from collections.abc import Sequence

from smkern.errors import RequestError
from smkern.limits import shown
from smkern.models.sampling import SamplingParams
from smkern.runtime.input_processor import Prompt


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts, also where one was given alone.

    Raises:
        RequestError: what is no sequence.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts are a {type(prompts).__name__}: pass a text, a list of token ids, or a list "
            "of these"
        )
    if len(prompts) and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """The params of each prompt.

    Raises:
        RequestError: values of another kind, or not as many as prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Sequence) else [params]
    for given in each:
        if not isinstance(given, SamplingParams):
            raise RequestError(
                f"params={shown(given)}: pass SamplingParams, one for all or one each"
            )
    if len(each) != count:
        raise RequestError(
            f"{len(each)} SamplingParams for {count} prompts: pass one for all, or one each"
        )
    return each
