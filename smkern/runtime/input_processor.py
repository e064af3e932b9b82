"""From a prompt as a user gives it to a request that can be served, or an error that names it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

import numpy as np

from smkern.errors import OutOfPagesError, RequestError
from smkern.kv import VirtualTokens
from smkern.limits import shown
from smkern.models.sampling import MAX_SEED, SamplingParams
from smkern.models.tokenizer import Detokenizer, Tokenizer, end_tokens
from smkern.runtime.executor import Executor
from smkern.runtime.request import Request

Prompt = str | Sequence[int] | VirtualTokens
"""A text, token ids, or, where no model reads them, virtual tokens."""


class InputProcessor:
    """Makes requests of prompts.

    Args:
        executor: Its model, pages and longest context are what requests must fit.
        tokenizer: For prompts that are texts, stop texts, and text of completions.
        seeds: For requests without a seed of their own.
        is_repeating: Whether requests that begin anew draw the same tokens again, and are compared.

    Attributes:
        reads_tokens: Whether any prompt so far had tokens, not only their number.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        seeds: Random,
        is_repeating: bool,
    ) -> None:
        self.reads_tokens = False
        self._is_repeating = is_repeating
        self._config = executor.config
        self._pool = executor.pool
        self._max_context = executor.max_context
        self._tokenizer = tokenizer
        self._ends = frozenset((*executor.config.eos_token_ids, *end_tokens(tokenizer)))
        self._seeds = seeds

    def process(self, index: int, prompt: Prompt, params: SamplingParams | None) -> Request:
        """The request of one prompt, called "prompt <index>" in errors.

        Raises:
            RequestError: a prompt or values that cannot be served, with the limit and the remedy.
            OutOfPagesError: a request that could not fit even alone.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params={shown(params)}: pass SamplingParams, one for all or one each"
            )
        params.check(f"prompt {index}", self._config.vocab_size)
        tokenizer = self._tokenizer
        ids: Any
        if isinstance(prompt, VirtualTokens):
            self._check_virtual(index, params)
            self._check_blocks(index, prompt)
            ids = prompt.copy()
        else:
            ids = self._checked(index, self._token_ids(index, prompt, params))
            self.reads_tokens = True
        self._check_context(index, len(ids))
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self._ends)
        request = Request(
            index,
            params,
            self._seeds.randint(0, MAX_SEED) if params.seed is None else params.seed,
            frozenset(stops),
            min(params.max_new_tokens, self._max_context - len(ids) + 1),
            ids,
            len(ids),
            None if tokenizer is None else Detokenizer(tokenizer, ids, params.stops),
        )
        self._check_fits(request)
        return request

    def _token_ids(self, index: int, prompt: Prompt, params: SamplingParams) -> list[Any]:
        if self._tokenizer is None and (isinstance(prompt, str) or params.stops):
            what = "is a text" if isinstance(prompt, str) else f"stops at {params.stops}"
            raise RequestError(
                f"prompt {index} {what}, and there is no tokenizer: pass token ids and "
                "stop_token_ids, or tokenizer=<folder>"
            )
        if not isinstance(prompt, str):
            if not isinstance(prompt, Iterable):
                raise RequestError(
                    f"prompt {index} is {shown(prompt)}: pass a text or a list of token ids; a "
                    "tensor's are its tolist()"
                )
            try:
                return [*prompt]
            except Exception as reason:
                raise RequestError(
                    f"prompt {index} raised {type(reason).__name__} when it was read ({reason}): "
                    "pass a text or a list of token ids"
                ) from reason
        assert self._tokenizer is not None
        try:
            return [*self._tokenizer.encode(prompt)]
        except Exception as reason:
            raise RequestError(
                f"prompt {index}: its tokenizer raised {type(reason).__name__}: {reason}; pass "
                "token ids, or another tokenizer"
            ) from reason

    def _checked(self, index: int, ids: list[Any]) -> array[int]:
        vocab = self._config.vocab_size
        if not ids:
            raise RequestError(f"prompt {index} is empty: pass at least one token")
        found = ids_of(ids, vocab)
        if found is None:
            position = next((at for at, x in enumerate(ids) if ids_of([x], vocab) is None), 0)
            raise RequestError(
                f"prompt {index} has {shown(ids[position])} at position {position}: token ids are "
                f"whole numbers of 0 to {vocab - 1}; use this model's tokenizer"
            )
        return found

    def _check_virtual(self, index: int, params: SamplingParams) -> None:
        if self._pool.has_memory:
            raise RequestError(
                f"prompt {index} is of virtual tokens, which a model cannot read: pass token ids, "
                "or run a SimExecutor"
            )
        if self._is_repeating:
            raise RequestError(
                f"prompt {index} is of virtual tokens, and batch_invariant=True compares tokens "
                "that are drawn again: leave it False"
            )
        if not params.ignore_eos or params.stop_token_ids or params.stops:
            raise RequestError(
                f"prompt {index} is of virtual tokens, and {params} ends at some: only their "
                "number is known; pass ignore_eos=True and no stops"
            )

    def _check_blocks(self, index: int, prompt: VirtualTokens) -> None:
        size, tokens, blocks = self._pool.page_size, prompt.block_tokens, prompt.blocks
        if blocks and tokens % size:
            raise RequestError(
                f"prompt {index} has blocks of {tokens} tokens, the pool has pages of {size}: take "
                "a page_size that divides block_tokens"
            )
        for name in blocks:
            if type(name) is not int or not 0 <= name < 1 << 63:
                raise RequestError(
                    f"prompt {index} has a block named {shown(name)}: names are whole numbers of "
                    "0 to 2^63 - 1"
                )

    def _check_context(self, index: int, num_tokens: int) -> None:
        if num_tokens > self._max_context:
            raise RequestError(
                f"prompt {index} has {num_tokens} tokens, the context holds {self._max_context}: "
                f"shorten it (the model's own context is {self._config.max_position}: max_context)"
            )

    def _check_fits(self, request: Request) -> None:
        pages = -(-request.max_tokens_held // self._pool.page_size)
        if pages > self._pool.num_pages:
            raise OutOfPagesError(
                f"{request} may take {request.max_tokens_held} tokens in {pages} pages, the pool "
                f"has {self._pool.num_pages} of {self._pool.page_size} tokens: lower "
                "max_new_tokens, shorten the prompt, or raise num_pages"
            )


def ids_of(tokens: Sequence[Any], vocab: int) -> array[int] | None:
    """One token id or more; None where one is no whole number in [0, vocab)."""
    try:
        ids = array("q", tokens)
    except Exception:  # noqa: BLE001  what lies in a prompt may raise anything
        return None
    numbers = np.frombuffer(ids, np.int64)
    return ids if numbers.min() >= 0 and numbers.max() < vocab else None


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
