"""Text in, text out: a model with its pool, its tokenizer and continuous batching."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import torch

from smkern.errors import ConfigError
from smkern.kv import KvPool, KvSizes
from smkern.models.admission import Admission, Prompt, as_prompts
from smkern.models.arena import Arena
from smkern.models.config import ModelConfig
from smkern.models.decoder import Decoder
from smkern.models.engine import Engine
from smkern.models.from_hf import token_ids
from smkern.models.hub import read_json
from smkern.models.presets import preset, presets
from smkern.models.request import Completion, Piece, Request
from smkern.models.sampling import SamplingParams
from smkern.models.text import Tokenizer, has_tokenizer, load_tokenizer
from smkern.models.weights import Weights
from smkern.ops.checks import as_int
from smkern.ops.warming import Bar
from smkern.partition import Partition

CPU_CONTEXT = 1024
"""Tokens that a CPU's pool holds for each request of the largest batch, unless told otherwise."""


class LLM:
    """A model that generates: plain continuous batching, prompts first, no multiplexing.

    Requests are admitted while pages last and wait otherwise; prompts run in ragged chunks, decode
    steps as one CUDA graph for a batch. Prefixes that are in the pool are not computed again. When
    pages run out, the youngest request gives its own back and is computed again later.

    Args:
        model: A folder with config.json, safetensors and maybe a tokenizer; or a preset's name or a
            configuration, with random weights.
        weights: Instead of those of the folder, or of random ones.
        device: Of weights that are loaded or drawn. None: the GPU where there is one, else the CPU.
        dtype: Of weights and activations. None: the configuration's.
        seed: Of random weights, and of requests without a seed of their own.
        tokenizer: A folder, or an object with `encode` and `decode`. None: the model's folder's.
        num_pages: Pages of the pool. None: as many as fit on the GPU; on a CPU, those of
            `max_batch` requests of 1024 tokens.
        memory_fraction: Of the GPU memory that is free behind weights and buffers.
        page_size: Tokens of a page.
        max_batch: Requests that run at a time.
        max_step_tokens: Tokens of a forward; longer prompts run in chunks.
        max_context: Tokens of a request, prompt included. None: the model's context.
        prefix_cache: Whether prefixes are found again.
        partition: Where all runs. None: on the whole device, also inside a `with partition:`.
        num_sms: SMs of every operator. None: all that the partition has.
        progress: Draw a progress bar while weights load.

    Attributes:
        config: The model.
        decoder: Its layers.
        pool: Its pages; `pool.usage` and `pool.check()` are there to be looked at.

    Raises:
        ConfigError: no such model, or one that cannot be served.
        WeightsError: the folder's files are wrong.
        OutOfPagesError: no memory for pages.

    Source: continuous batching as in Orca (OSDI 2022) section 3.2; pages as in PagedAttention
        (arXiv 2309.06180) section 4; chunks of prompts as in Sarathi (arXiv 2308.16369) section 4.

    Example:
        >>> import torch
        >>> from smkern.models import LLM, SamplingParams, preset
        >>> small = preset("qwen3-8b").replace(
        ...     num_layers=1, hidden_size=64, num_q_heads=2, num_kv_heads=1,
        ...     intermediate_size=96, vocab_size=32, dtype=torch.float32, max_position=64)
        >>> llm = LLM(small, device="cpu")
        >>> done = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=4))
        >>> [(len(x.tokens), x.finish_reason) for x in done]
        [(4, 'length'), (4, 'length')]
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        *,
        weights: Weights | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        tokenizer: str | Path | Tokenizer | None = None,
        num_pages: int | None = None,
        memory_fraction: float = 0.9,
        page_size: int = 16,
        max_batch: int = 64,
        max_step_tokens: int = 8192,
        max_context: int | None = None,
        prefix_cache: bool = True,
        partition: Partition | None = None,
        num_sms: int | None = None,
        progress: bool = False,
    ) -> None:
        as_int("max_batch", max_batch, 1)
        as_int("max_step_tokens", max_step_tokens, 1)
        config, folder = _find(model)
        if dtype is not None:
            config = config.replace(dtype=dtype)
        max_context = config.max_position if max_context is None else max_context
        as_int("max_context", max_context, 1, config.max_position)
        if weights is None:
            where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
            weights = _weights(config, folder, where, dtype, seed, progress)
        self.config = config
        self.decoder = Decoder(config, weights, max_position=max_context)
        arena = Arena(config, max(max_step_tokens, max_batch), max_batch, self.decoder.device)
        sizes = KvSizes(
            config.num_layers, config.num_kv_heads, config.head_dim, page_size, config.dtype
        )
        if num_pages is None and self.decoder.device.type == "cpu":
            num_pages = max_batch * -(-min(max_context, CPU_CONTEXT) // page_size)
        self.pool = KvPool(
            sizes,
            num_pages=num_pages,
            memory_fraction=memory_fraction,
            device=self.decoder.device,
            reuse=prefix_cache,
        )
        self._engine = Engine(
            self.decoder,
            self.pool,
            arena,
            max_context=max_context,
            partition=partition,
            num_sms=num_sms,
        )
        self._max_context = max_context
        self._seeds = Random(seed)
        self._tokenizer: Path | Tokenizer | None = folder
        self._has_own_tokenizer = tokenizer is None
        if tokenizer is not None:
            self._tokenizer = Path(tokenizer) if isinstance(tokenizer, str) else tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Generate to the end of every prompt.

        Args:
            prompts: Texts or lists of token ids, one or several.
            params: For all prompts, or one each. None: 128 greedy tokens.
            progress: Draw a progress bar.

        Returns:
            A completion for each prompt, in their order.

        Raises:
            RequestError: naming the prompt: empty, longer than the context, tokens outside the
                vocabulary, text without a tokenizer, or sampling values out of range. Nothing ran.
            OutOfPagesError: a request that could not fit even alone. Nothing ran.

        Example:
            >>> llm = LLM("/models/Qwen3-8B")                                  # doctest: +SKIP
            >>> llm.generate("Once upon a time")[0].text                       # doctest: +SKIP
        """
        requests = self._requests(prompts, params)
        finished: dict[int, Completion] = {}
        with closing(self._engine.run(requests)) as steps, Bar(progress) as bar:
            show = bar.step("generate", len(requests))
            for pieces in steps:
                done = [piece.completion for piece in pieces if piece.completion is not None]
                finished.update((completion.index, completion) for completion in done)
                show(len(finished))
        return [finished[index] for index in range(len(requests))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Piece]:
        """Generate, and yield every token when it is drawn.

        Closing the iterator early gives all pages back. One runs at a time.

        Args:
            prompts: As in `generate`.
            params: As in `generate`.

        Raises:
            RequestError, OutOfPagesError: as in `generate`, before the first piece is asked for.

        Example:
            >>> for piece in llm.stream("Once upon a time"):                   # doctest: +SKIP
            ...     print(piece.text, end="", flush=True)
        """
        return _flatten(self._engine.run(self._requests(prompts, params)))

    def close(self) -> None:
        """Destroy the graphs, so that a partition can close. Closing twice is fine."""
        self._engine.close()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        admission = Admission(
            self.config, self.pool, self._max_context, self._find_tokenizer, self._seeds
        )
        return admission.requests(as_prompts(prompts), params)

    def _find_tokenizer(self, needed: bool) -> Tokenizer | None:
        """The tokenizer, loaded when it is first asked for; None where there is none."""
        if not isinstance(self._tokenizer, Path):
            return self._tokenizer
        if self._has_own_tokenizer:
            if not has_tokenizer(self._tokenizer):
                return None
            if not needed and find_spec("transformers") is None:
                return None  # token ids come out all the same
        self._tokenizer = load_tokenizer(self._tokenizer)
        return self._tokenizer


def _find(model: str | Path | ModelConfig) -> tuple[ModelConfig, Path | None]:
    """A model's configuration, and the folder of its weights if it has one."""
    if isinstance(model, ModelConfig):
        return model, None
    folder = Path(model)
    if folder.is_dir():
        config = ModelConfig.from_hf(folder)
        return config.replace(eos_token_ids=_end_tokens(config, folder)), folder
    if str(model).lower() in presets():
        return preset(str(model)), None
    raise ConfigError(
        f"model {str(model)!r} is neither a folder nor one of {sorted(presets())}: pass a folder "
        "with config.json, a preset or a ModelConfig"
    )


def _end_tokens(config: ModelConfig, folder: Path) -> tuple[int, ...]:
    """The tokens that end a text: those of config.json, and of generation_config.json."""
    path = folder / "generation_config.json"
    given: Any = read_json(path, ConfigError).get("eos_token_id") if path.is_file() else None
    more = token_ids(f"eos_token_id in {path}", given)
    return tuple(dict.fromkeys((*config.eos_token_ids, *more)))


def _weights(
    config: ModelConfig,
    folder: Path | None,
    device: torch.device,
    dtype: torch.dtype | None,
    seed: int,
    progress: bool,
) -> Weights:
    if folder is None:
        return Weights.random(config, seed, device)
    return Weights.load(folder, config=config, device=device, dtype=dtype, progress=progress)


def _flatten(steps: Generator[list[Piece], None, None]) -> Iterator[Piece]:
    with closing(steps):
        for pieces in steps:
            yield from pieces
