"""From prompts as a user gives them to requests that the engine can serve, or a named refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from smkern.errors import OutOfPagesError, RequestError
from smkern.kv import PagePool
from smkern.models.config import ModelConfig
from smkern.models.request import Request
from smkern.models.sampling import MAX_SEED, SamplingParams
from smkern.models.text import TextStream, Tokenizer

Prompt = str | Sequence[int]
"""A text, or token ids."""


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
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


class Admission:
    """Makes requests of prompts, all of them or none.

    Args:
        config: The model.
        pool: Whose pages they will need.
        max_context: Tokens of a request, prompt included.
        find_tokenizer: The tokenizer; given whether it is needed, for otherwise it may be missing.
        seeds: For requests without a seed.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: PagePool,
        max_context: int,
        find_tokenizer: Callable[[bool], Tokenizer | None],
        seeds: Random,
    ) -> None:
        self._config = config
        self._pool = pool
        self._max_context = max_context
        self._find_tokenizer = find_tokenizer
        self._seeds = seeds

    def requests(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """A request for each prompt.

        Raises:
            RequestError: naming the prompt, its value, the limit and what to do.
            OutOfPagesError: one that could not fit even alone.
        """
        each = _for_each(params, len(prompts))
        for index, wanted in enumerate(each):
            wanted.check(f"prompt {index}", self._config.vocab_size)
        needed = any(isinstance(x, str) for x in prompts) or any(x.stops for x in each)
        tokenizer = self._find_tokenizer(needed)
        return [
            self._request(index, prompt, wanted, tokenizer)
            for index, (prompt, wanted) in enumerate(zip(prompts, each, strict=True))
        ]

    def request(self, index: int, prompt: Prompt, params: SamplingParams | None) -> Request:
        """The request of one prompt, which is named `index`; raises as `requests` does."""
        (wanted,) = _for_each(params, 1)
        wanted.check(f"prompt {index}", self._config.vocab_size)
        tokenizer = self._find_tokenizer(isinstance(prompt, str) or bool(wanted.stops))
        return self._request(index, prompt, wanted, tokenizer)

    def _request(
        self, index: int, prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> Request:
        if tokenizer is None and (isinstance(prompt, str) or params.stops):
            what = "is a text" if isinstance(prompt, str) else f"stops at {params.stops}"
            raise RequestError(
                f"prompt {index} {what}, and there is no tokenizer: pass token ids and "
                "stop_token_ids, or tokenizer=<folder>"
            )
        if isinstance(prompt, str):
            assert tokenizer is not None
            ids = _encoded(index, prompt, tokenizer)
        elif not isinstance(prompt, Iterable):
            raise RequestError(
                f"prompt {index} is {prompt!r}: pass a text or a list of token ids; a tensor's are "
                "its tolist()"
            )
        else:
            ids = [*prompt]
        self._check_tokens(index, ids)
        room = self._max_context - len(ids) + 1
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops.update(self._config.eos_token_ids)
        request = Request(
            index,
            params,
            self._seeds.randint(0, MAX_SEED) if params.seed is None else params.seed,
            frozenset(stops),
            min(params.max_new_tokens, room),
            ids,
            len(ids),
            None if tokenizer is None else TextStream(tokenizer, ids, params.stops),
        )
        self._check_fits(request)
        return request

    def _check_tokens(self, index: int, ids: Sequence[int]) -> None:
        vocab = self._config.vocab_size
        if not ids:
            raise RequestError(f"prompt {index} is empty: pass at least one token")
        for position, token in enumerate(ids):
            if not isinstance(token, int) or not 0 <= token < vocab:
                raise RequestError(
                    f"prompt {index} has {token!r} at position {position}: token ids are whole "
                    f"numbers of 0 to {vocab - 1}; use this model's tokenizer"
                )
        if len(ids) > self._max_context:
            raise RequestError(
                f"prompt {index} has {len(ids)} tokens, the context holds {self._max_context}: "
                f"shorten it (the model's own context is {self._config.max_position}: max_context)"
            )

    def _check_fits(self, request: Request) -> None:
        pages = self._pool.pages_for(request.max_tokens_held)
        if pages > self._pool.num_pages:
            raise OutOfPagesError(
                f"{request} may take {request.max_tokens_held} tokens in {pages} pages, the pool "
                f"has {self._pool.num_pages} of {self._pool.page_size} tokens: lower "
                "max_new_tokens, shorten the prompt, or raise num_pages"
            )


def _encoded(index: int, prompt: str, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a text.

    Raises:
        RequestError: the tokenizer raised, whatever it was.
    """
    try:
        return tokenizer.encode(prompt)
    except Exception as reason:
        raise RequestError(
            f"prompt {index}: its tokenizer raised {type(reason).__name__}: {reason}; pass token "
            "ids, or another tokenizer"
        ) from reason


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = list(params) if isinstance(params, Sequence) else [params]
    for given in each:
        if not isinstance(given, SamplingParams):
            raise RequestError(f"params={given!r}: pass SamplingParams, one for all or one each")
    if len(each) != count:
        raise RequestError(
            f"{len(each)} SamplingParams for {count} prompts: pass one for all, or one each"
        )
    return each
