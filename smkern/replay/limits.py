"""When the first token of each request is wanted: a property of the trace, the same for all."""

from __future__ import annotations

from collections import OrderedDict

from smkern.errors import ArgumentError
from smkern.policies.order import first_token_us
from smkern.replay.trace import Trace


def new_tokens(trace: Trace, cache_tokens: int) -> list[int]:
    """Prompt tokens of each request that a cache does not hold when it comes.

    The cache holds named blocks, the least recently used leaves first, and each request finds what
    those before it left: as if every prompt were computed at once, so it is no policy's doing. The
    last token is always computed.

    Args:
        trace: The requests.
        cache_tokens: Size of the cache, the pool's.

    Raises:
        ArgumentError: a size below 0.

    Example:
        >>> from smkern.replay import Arrival, Trace
        >>> trace = Trace("t", (Arrival(0.0, 1024, 1, (1, 2)), Arrival(1.0, 1500, 1, (1, 2, 3))))
        >>> new_tokens(trace, 2048), new_tokens(trace, 512)
        ([1024, 476], [1024, 1500])
    """
    if cache_tokens < 0:
        raise ArgumentError(f"cache_tokens={cache_tokens}: give 0 or more")
    size, most = trace.block_tokens, cache_tokens // trace.block_tokens
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in trace.requests:
        hits = 0
        for block in request.blocks:
            if block not in cache:
                break
            hits += 1
        for block in request.blocks[: request.prompt_tokens // size]:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > most:
            cache.popitem(last=False)
        found.append(max(1, request.prompt_tokens - hits * size))
    return found


def ttft_limits_s(trace: Trace, cache_tokens: int) -> list[float]:
    """`smkern.policies.order.first_token_us` of each request's new tokens, in the trace's order."""
    return [1e-6 * first_token_us(new) for new in new_tokens(trace, cache_tokens)]
