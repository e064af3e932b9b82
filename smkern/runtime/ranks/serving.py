"""One rank's part of a model, its pages and a ladder become a runtime over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.errors import ArgumentError, RankError
from smkern.kv import KvPool
from smkern.models.decoder import Decoder
from smkern.partition import Ladder
from smkern.runtime.device import Device
from smkern.runtime.model.executor import GRAPH_LIMIT_BYTES, ModelExecutor
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.ranks.channel import Links, open_links
from smkern.runtime.ranks.follower import follow
from smkern.runtime.ranks.leader import RankExecutor


def serve_ranks(
    model: Decoder,
    pool: KvPool,
    *,
    ladder: Ladder | None = None,
    device: Device | None = None,
    max_running: int = 128,
    max_prefill: int = 16,
    max_tokens: int = 8192,
    max_context: int | None = None,
    num_sms: int | None = None,
    rungs: Iterable[int | None] | None = None,
    graph_limit_bytes: int = GRAPH_LIMIT_BYTES,
    **options: Any,
) -> Multiplexer | None:
    """As `smkern.serve`, for a model that several GPUs share; called on all ranks.

    Args:
        model: This rank's part, made with `tp`.
        pool: Its pages: a `KvPool` on rank 0, a `KvReplica` of as many pages on the others.
        ladder, device, max_running, max_prefill, max_tokens, max_context, num_sms, rungs,
            graph_limit_bytes: As of `smkern.serve`, the same on all ranks.
        options: Of the `Multiplexer`, such as `policy`; only rank 0 reads them.

    Returns:
        On rank 0 the runtime. On the others None, once rank 0 has closed it: until then they
        launch what rank 0 launches.

    Raises:
        ArgumentError: settings that cannot be, or a model that is no part.
        RankError: ranks that differ; or while it serves, a rank that is gone, hangs or failed.

    Example:
        >>> mux = serve_ranks(decoder, pool, ladder=ladder)                    # doctest: +SKIP
        >>> if mux is not None:                                                # doctest: +SKIP
        ...     handle = mux.submit(tokens)
        ...     outputs = list(mux.run())
        ...     mux.close()
    """
    tp = model.tp
    if tp is None:
        raise ArgumentError("a model that one GPU has whole: call smkern.serve")
    sizes: dict[str, Any] = {
        "max_running": max_running, "max_prefill": max_prefill, "max_tokens": max_tokens,
        "max_context": max_context, "num_sms": num_sms, "graph_limit_bytes": graph_limit_bytes,
    }  # fmt: skip
    rungs_here = None if ladder is None else ladder.rungs
    tp.agree({**sizes, "num_pages": pool.num_pages, "rungs of the ladder": rungs_here})
    executor = tp.together(
        "taking memory for its buffers",
        lambda: ModelExecutor(model, pool, ladder=ladder, device=device, **sizes),
    )
    if model.device.type == "cuda":
        executor.warm()
        executor.capture(rungs)
    tp.agree({"the decode graphs": sorted(executor.graphs.by_graph)})
    links = open_links(tp)
    if isinstance(links, Links):
        return Multiplexer(
            RankExecutor(executor, links), batch_invariant=model.batch_invariant, **options
        )
    try:
        follow(executor, links)
    except RankError:
        tp.close(abort=True)
        raise
    return None
