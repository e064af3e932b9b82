"""One rank's part of a model, its pages and a ladder become a runtime over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.errors import ArgumentError, RankError
from smkern.kv import KvPool
from smkern.models.decoder import Decoder
from smkern.partition import Ladder
from smkern.runtime.device import Device
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.ranks.channel import Links, open_links
from smkern.runtime.ranks.follower import follow
from smkern.runtime.ranks.leader import RankExecutor

_FITTED = ("max_running", "max_prefill", "max_tokens", "max_context", "num_sms",
           "graph_limit_bytes")  # fmt: skip
"""What an executor's buffers and graphs follow from: the same on all ranks."""


def serve_ranks(
    model: Decoder,
    pool: KvPool,
    *,
    ladder: Ladder | None = None,
    device: Device | None = None,
    rungs: Iterable[int | None] | None = None,
    **options: Any,
) -> Multiplexer | None:
    """As `smkern.serve`, for a model that several GPUs share; called on all ranks.

    Args:
        model: This rank's part, made with `tp`.
        pool: Its pages: a `KvPool` on rank 0, a `KvReplica` of as many pages on the others.
        ladder, device, rungs: As of `smkern.serve`, the same on all ranks.
        options: The others of `smkern.serve`: those of the executor, such as `max_running`, the
            same on all ranks; those of the `Multiplexer`, such as `policy`, are read on rank 0.

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
    sizes = {name: options.pop(name) for name in _FITTED if name in options}
    rungs_here = None if ladder is None else ladder.rungs
    tp.agree(
        {
            "the names of sizes": sorted(sizes),
            **sizes,
            "num_pages": pool.num_pages,
            "rungs of the ladder": rungs_here,
        }
    )
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
        try:
            ranked = RankExecutor(executor, links)
            return Multiplexer(ranked, batch_invariant=model.batch_invariant, **options)
        except Exception:
            links.close()  # the others end with this call
            raise
    try:
        follow(executor, links)
    except RankError:
        tp.close(abort=True)
        raise
    return None
