"""Text in, text out: a model with its pool and its tokenizer, served by the runtime."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

from smkern.device import torch_device
from smkern.errors import ArgumentError, ModelError, RequestError
from smkern.limits import shown
from smkern.models.config import ModelConfig
from smkern.models.decoder import Decoder
from smkern.models.presets import find_model
from smkern.models.quantization import KINDS, Kind
from smkern.models.sampling import MAX_SEED, SamplingParams
from smkern.models.tokenizer import Tokenizer, load_tokenizer
from smkern.models.weights import Weights
from smkern.ops.checks import as_int, check_page_size
from smkern.ops.warming import Bar
from smkern.partition import Partition
from smkern.policies import Chunked
from smkern.runtime.executor import MemoryReport
from smkern.runtime.handle import Handle, Output
from smkern.runtime.input_processor import Prompt, as_list, for_each
from smkern.runtime.loading import check_kind, find_tokenizer, find_weights, kv_sizes
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.model.prefill import activation_bytes
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.ranks.group import RankGroup
from smkern.runtime.ranks.leader import RankExecutor
from smkern.runtime.request import Completion
from smkern.runtime.watchdog import catch_up

CPU_CONTEXT = 1024
"""Tokens that a CPU's pool holds for each request of the largest batch, unless told otherwise."""


class LLM:
    """A model that generates: `smkern.serve` with `Chunked`, one call at a time.

    Requests are admitted while pages last and wait otherwise. Every forward takes a token of each
    request that decodes and as much of the waiting prompts as fits; decode steps without prompts
    are CUDA graphs. Prefixes that are in the pool are not computed again. When pages run out, the
    youngest request gives its own back and is computed again later.

    Args:
        model: A folder with config.json, safetensors and maybe a tokenizer; or a preset's name or a
            configuration, with random weights.
        weights: Instead of the folder's, or of random ones; quantized or not, whatever the
            configuration says.
        device: Device of weights that are loaded or drawn. None: the GPU where there is one, else
            the CPU.
        dtype: Dtype of weights and activations, or "fp8-block", "fp8-channel" or "fp8-tensor" for
            linear layers in fp8: weights of a folder that are not are quantized when they are
            loaded, and the rest converted. None: the configuration's.
        kv_dtype: Dtype of the KV pool: torch.float8_e4m3fn, or the model's. With fp8 the
            checkpoint's scales count, 1 where it has none. None: the model's.
        seed: Seed of random weights, and of requests without a seed of their own.
        tokenizer: A folder, or an object with `encode` and `decode`. None: the model's folder's.
        num_pages: Pages of the pool. None: as many as fit on the GPU; on a CPU, those of
            `max_batch` requests of 1024 tokens.
        memory_fraction: Share of the GPU memory that is free behind weights and activations.
        page_size: Tokens of a page.
        max_batch: Requests that run at a time.
        max_step_tokens: Prompt tokens of a forward; longer prompts run in chunks.
        max_context: Tokens of a request, prompt included. None: the model's context.
        prefix_cache: Whether prefixes are found again.
        partition: Where all runs. None: on the whole device, also inside a `with partition:`.
        num_sms: SMs of every operator. None: all that the partition has.
        tp: GPUs that share the model, under `torchrun --nproc-per-node <tp>`: each process makes
            the same `LLM`, rank 0 generates, and the others `follow`.
        progress: Draw a progress bar while weights load.

    Attributes:
        config: The model.
        rank: This process among those that share the model; 0 where it is alone.
        decoder: Its layers.
        pool: Its pages; `pool.usage` and `pool.check()` are there to be looked at.

    Raises:
        DeviceError: no such device, or a GPU where torch sees none.
        ConfigError: no such model, one that cannot be served, or files that are no tokenizer.
        WeightsError: the folder's files are wrong.
        OutOfPagesError: no memory for pages.
        ArgumentError: sizes that cannot be, or a partition for weights on a CPU.
        RankError: ranks that do not come, or that differ; on all of them, before anything runs.

    Source: continuous batching as in Orca (OSDI 2022) section 3.2; pages as in PagedAttention
        (arXiv 2309.06180) section 4; chunks of prompts as in Sarathi (arXiv 2308.16369) section 4.

    Example:
        >>> import smkern, torch
        >>> from smkern.models import SamplingParams, preset
        >>> small = preset("qwen3-8b").replace(
        ...     num_layers=1, hidden_size=64, num_q_heads=2, num_kv_heads=1,
        ...     intermediate_size=96, vocab_size=32, dtype=torch.float32, max_position=64)
        >>> llm = smkern.LLM(small, device="cpu")
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
        dtype: torch.dtype | Kind | None = None,
        kv_dtype: torch.dtype | None = None,
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
        tp: int = 1,
        progress: bool = False,
    ) -> None:
        as_int("max_batch", max_batch, 1)
        as_int("max_step_tokens", max_step_tokens, 1)
        check_page_size(page_size)
        seed = as_int("seed", seed, 0, MAX_SEED)
        if weights is not None and not isinstance(weights, Weights):
            raise ArgumentError(f"weights={shown(weights)}: pass Weights, or None")
        kind = dtype if isinstance(dtype, str) and dtype in KINDS else None
        plain = dtype if isinstance(dtype, torch.dtype) else None
        if not (dtype is None or plain is not None or kind is not None):
            raise ArgumentError(
                f"dtype={shown(dtype)}: pass a torch.dtype, one of {KINDS}, or None"
            )
        config, folder = find_model(model)
        if plain is not None:
            config = config.replace(dtype=plain)
        max_context = config.max_position if max_context is None else max_context
        as_int("max_context", max_context, 1, config.max_position)
        self._tokenizer, self._unread_tokenizer = find_tokenizer(folder, tokenizer)
        self._ranks = ranks = RankGroup(tp, device)
        self.rank = ranks.rank
        if weights is None:
            weights = ranks.together(
                "loading its weights",
                lambda: find_weights(
                    config, folder, torch_device(device), plain, kind, seed, ranks.shard, progress
                ),
            )
            config = config.replace(dtype=weights.config.dtype)  # on a GPU fp8 of fp32 is bf16's
        elif kind is not None:
            check_kind(weights, kind)
        config = config.replace(quantization=weights.config.quantization)
        self.config = config
        self.decoder = Decoder(config, weights, max_position=max_context, tp=ranks.tp)
        ranks.fuse(self.decoder)
        part = self.decoder.config
        largest: Any = {
            "max_running": max_batch,
            "max_prefill": max_batch,
            "max_tokens": max_step_tokens,
        }
        on_gpu = self.decoder.device.type == "cuda"
        if num_pages is None and not on_gpu:
            num_pages = max_batch * -(-min(max_context, CPU_CONTEXT) // page_size)
        ranks.agree({"seed": seed, "page_size": page_size, "num_pages": num_pages, **largest})
        self.pool = ranks.pool(
            kv_sizes(part, page_size, kv_dtype),
            num_pages=num_pages,
            memory_fraction=memory_fraction,
            reserved_bytes=activation_bytes(part, **largest),
            device=self.decoder.device,
            reuse=prefix_cache,
        )
        self._partition = partition
        self._sizes = {"max_context": max_context, "num_sms": num_sms, **largest}
        self._executor: ModelExecutor | RankExecutor | None = None
        self._opened()
        self._max_step_tokens = max_step_tokens
        self._seeds = Random(seed)
        self._is_busy = False

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
            A completion for each prompt, in their order. Where the tokenizer raised at a text it is
            what there is of that one, with `finish_reason="error"` and the error.

        Raises:
            RequestError: naming the prompt: empty, longer than the context, tokens outside the
                vocabulary, text without a tokenizer or that it raises at, or sampling values out of
                range. Nothing ran.
            OutOfPagesError: a request that could not fit even alone. Nothing ran.

        Example:
            >>> llm = smkern.LLM("/models/Qwen3-8B")                           # doctest: +SKIP
            >>> llm.generate("Once upon a time")[0].text                       # doctest: +SKIP
        """
        finished: dict[int, Completion] = {}
        mux, requests = self._submit(prompts, params)
        with closing(self._run(mux, requests)) as outputs, Bar(progress) as bar:
            show = bar.step("generate", len(requests))
            for output in outputs:
                if output.completion is not None:
                    finished[output.id] = output.completion
                    show(len(finished))
        return [finished[index] for index in range(len(requests))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Output]:
        """Generate, and yield every token when it is drawn; an output's `id` is the prompt's index.
        One whose tokenizer raises ends with an `error` beside its completion.

        Closing the iterator early gives all pages back. One runs at a time.

        Args:
            prompts: As in `generate`.
            params: As in `generate`.

        Raises:
            RequestError, OutOfPagesError: as in `generate`, before the first output is asked for.

        Example:
            >>> for output in llm.stream("Once upon a time"):                  # doctest: +SKIP
            ...     print(output.text, end="", flush=True)
        """
        return self._run(*self._submit(prompts, params))

    def follow(self) -> None:
        """On other ranks than 0: serve what rank 0 generates, until it closes or ends.

        Raises:
            ArgumentError: on rank 0.
            RankError: a rank is gone, hangs or failed; it is named.
        """
        self._ranks.follow(self._opened())

    def memory_report(self) -> MemoryReport:
        """Device memory of graphs, activations, state and pages."""
        return self._opened().memory_report()

    def close(self) -> None:
        """Destroy the graphs, so that a partition can close; the other ranks' `follow` returns.
        Closing twice is fine."""
        if self._executor is not None:
            self._executor.close()

    def _opened(self) -> ModelExecutor | RankExecutor:
        """The executor; another one where a call was stopped midway, as by an interrupt.

        Raises:
            PoolCorruptError: the pool was, too.
        """
        if self._executor is None:
            self.pool.check()
            device, partition = self.decoder.device, self._partition
            executor = self._ranks.together(
                "taking memory for its buffers",
                lambda: ModelExecutor(
                    self.decoder,
                    self.pool,
                    device=None if partition is None else _device_in(partition, device),
                    **self._sizes,
                ),
            )
            if device.type == "cuda":
                executor.warm()
                executor.capture()
            self._executor = self._ranks.executor(executor)
        return self._executor

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[Multiplexer, list[Handle]]:
        """A runtime for the requests of this call alone, and these; nothing runs."""
        self._ranks.check_leads()
        given = as_list(prompts)
        each = for_each(params, len(given))
        is_text = any(isinstance(x, str) for x in given) or any(x.stop for x in each)
        if is_text and self._unread_tokenizer is not None:
            load_tokenizer(self._unread_tokenizer)  # says what is missing
        mux = Multiplexer(
            self._opened(),
            # Prompts take all that a forward holds: a batch job has no reader between two tokens.
            # Nothing is launched ahead, so batches do not follow from timing: the same call on the
            # same pool draws the same tokens.
            policy=Chunked(chunk_tokens=self._max_step_tokens, steps=1, ahead=False),
            tokenizer=self._tokenizer,
        )
        handles: list[Handle] = []
        for prompt, wanted in zip(given, each, strict=True):
            if wanted.seed is None:
                wanted = replace(wanted, seed=self._seeds.randint(0, MAX_SEED))
            handles.append(mux.submit(prompt, wanted))
        return mux, handles

    def _run(self, mux: Multiplexer, handles: list[Handle]) -> Generator[Output, None, None]:
        """Serve to the end; one that is left early, or that raises, gives all pages back."""
        if self._is_busy:
            raise ArgumentError(
                "a generation is running on this LLM: exhaust or close its iterator first"
            )
        self._is_busy = True
        try:
            for output in mux.run():
                error = output.error
                if isinstance(error, RequestError):  # of this one alone
                    output = output._replace(completion=handles[output.id]._request.became("error"))
                elif error is not None:
                    # What the model raised comes out as it was.
                    cause = error.__cause__ if isinstance(error, ModelError) else None
                    raise cause or error
                yield output
            # Graphs that this call missed are there for the next one.
            catch_up(self._opened(), mux.timeline)
        finally:
            self._is_busy = False
            if mux.dead is None:
                for handle in handles:
                    mux.cancel(handle)
                for _ in mux.run():
                    pass
                self.pool.poll()
            else:
                self._executor = None
                mux.close()


def _device_in(partition: Partition, device: torch.device) -> Any:
    if device.type != "cuda":
        raise ArgumentError(
            f"partition={shown(partition)} for weights on {device}: partitions are a GPU's; pass "
            'device="cuda", or leave partition out'
        )
    from smkern.runtime.cuda_device import CudaDevice

    return CudaDevice(device=device.index, partition=partition)
