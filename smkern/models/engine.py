"""Requests in, tokens out: the scheduler's work run on a device, one forward after another."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from smkern.errors import ArgumentError
from smkern.kv import Event, KvPool
from smkern.models.arena import Arena
from smkern.models.decode_rows import DecodeRows, batch_bucket, context_bucket
from smkern.models.decoder import Decoder
from smkern.models.graph import DecodeGraph
from smkern.models.prompts import PromptRunner
from smkern.models.request import Piece, Request
from smkern.models.scheduler import Chunk, Scheduler, Work
from smkern.partition import Partition


class Engine:
    """Continuous batching on one stream: prompts in ragged chunks, decode steps as graphs.

    On a GPU a decode step is one replay of a graph, captured when a batch or context of its size
    first comes; on a CPU the operators are called.

    Args:
        decoder: The model.
        pool: Its pages.
        arena: Buffers of the largest forward; its sizes bound the batch and the step.
        max_context: Tokens of a request.
        partition: Where all runs. None: on the stream that is current when it runs.
        num_sms: SMs of every operator. None: all that the partition has.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        arena: Arena,
        *,
        max_context: int,
        partition: Partition | None = None,
        num_sms: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._arena = arena
        self._max_context = max_context
        self._partition = partition
        self._num_sms = num_sms
        self._caches = [pool.layer(i) for i in range(decoder.config.num_layers)]
        self._prompts = PromptRunner(
            decoder, pool, self._caches, arena, max_context=max_context, num_sms=num_sms
        )
        self._rows = DecodeRows(pool, arena.max_batch, max_context)
        self._graphs: dict[tuple[int, int], DecodeGraph] = {}
        self._busy = False
        if decoder.device.type == "cuda":
            # The buffers are made on this stream, and used on others.
            torch.cuda.synchronize(decoder.device)

    def run(self, requests: Iterable[Request]) -> Generator[list[Piece], None, None]:
        """Run requests to their ends; yields what each forward drew.

        An iterator that is dropped, or that raises, gives all pages back.

        Raises:
            ArgumentError: another run has not ended.
        """
        if self._busy:
            raise ArgumentError(
                "a generation is running on this LLM: exhaust or close its iterator first"
            )
        while self._pool.poll():  # what the last launches of a run that was left still read
            time.sleep(1e-4)
        scheduler = Scheduler(self._pool, self._arena.max_batch, self._arena.max_tokens)
        for request in requests:
            scheduler.add(request)
        self._busy = True
        try:
            while not scheduler.is_idle:
                yield self._forward(scheduler)
        finally:
            scheduler.abort(self._last_event())
            self._rows.clear()
            self._busy = False

    def close(self) -> None:
        """Destroy the graphs. Closing twice is fine."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()

    def _forward(self, scheduler: Scheduler) -> list[Piece]:
        work = scheduler.next()
        if work.decodes:
            drawn = self._decode(work)
        else:
            with self._place():
                drawn = self._prompts.run(work.chunks)
        scheduler.done(work)
        pieces = [
            chunk.request.accept(token)
            for chunk, token in zip(work.chunks, drawn, strict=True)
            if token is not None
        ]
        scheduler.drop_finished()
        return pieces

    def _decode(self, work: Work) -> list[int | None]:
        requests = [chunk.request for chunk in work.chunks]
        # Captured outside the partition, whose stream must not own what a graph keeps.
        graph = self._graph(work.chunks)
        with self._place():
            self._rows.arrange(requests)
            graph.replay()
            tokens = self._rows.tokens()
        drawn = dict(zip(self._rows.requests, tokens, strict=True))
        return [drawn[request] for request in requests]

    def _graph(self, chunks: list[Chunk]) -> DecodeGraph:
        batch = len(chunks)
        if self._decoder.device.type != "cpu":
            batch = batch_bucket(batch, self._arena.max_batch)
        longest = max(len(chunk.request.ids) for chunk in chunks)
        key = batch, context_bucket(longest, self._max_context)
        if key not in self._graphs:
            self._graphs[key] = DecodeGraph(
                self._decoder,
                self._rows.inputs(batch),
                self._caches,
                max_kv_len=key[1],
                partition=self._partition,
                arena=self._arena,
                num_sms=self._num_sms,
            )
        return self._graphs[key]

    def _place(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._partition is None else self._partition

    def _last_event(self) -> Event | None:
        """Behind all that was launched; None where it is over."""
        if self._partition is not None and self._partition.closed:
            return None  # closing waited for it
        if self._decoder.device.type == "cpu":
            return None
        with self._place():
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._decoder.device))
        return event
