"""A model, its pages and a ladder become a runtime that is ready to serve."""

from __future__ import annotations

from collections.abc import Iterable

from smkern.errors import ArgumentError
from smkern.kv import KvPool
from smkern.models.layered import LayeredModel
from smkern.models.tokenizer import Tokenizer
from smkern.partition import Ladder
from smkern.policies import Policy
from smkern.runtime.device import Device
from smkern.runtime.model.executor import GRAPH_LIMIT_BYTES, ModelExecutor
from smkern.runtime.model.sizes import is_summed
from smkern.runtime.multiplexer import STALL_S, Multiplexer
from smkern.runtime.queues import Preemption
from smkern.runtime.timeline.timeline import Timeline


def serve(
    model: LayeredModel,
    pool: KvPool,
    *,
    ladder: Ladder | None = None,
    policy: Policy | None = None,
    device: Device | None = None,
    max_running: int = 128,
    max_prefill: int = 16,
    max_tokens: int = 8192,
    max_context: int | None = None,
    num_sms: int | None = None,
    rungs: Iterable[int | None] | None = None,
    graph_limit_bytes: int = GRAPH_LIMIT_BYTES,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    preemption: Preemption = "recompute",
    impatient: bool = False,
    stall_timeout_s: float = STALL_S,
    timeline: Timeline | None = None,
) -> Multiplexer:
    """A `Multiplexer` over a `ModelExecutor` whose buffers are made and decode graphs captured.

    Waits for the device. Kernels that were never compiled compile here or, of sizes that nothing
    here runs, in the serving loop: `smkern.warmup(calls=[ModelCalls(config)])` beforehand compiles
    all. On CPU tensors there is nothing to capture.

    Args:
        model: A `Decoder`, or what else offers embed, layer and head. Its `batch_invariant` is the
            runtime's; the pool of such a one is made with `reuse=False`.
        pool: Its pages, on its device.
        ladder: The splits, open until the runtime is closed. None: the whole device alone.
        policy: Decides. None: `smkern.policies.Chunked()`.
        device: What to launch on. None: made of the ladder.
        max_running: Requests that decode at a time.
        max_prefill: Requests of a batch of prompts.
        max_tokens: New tokens of one.
        max_context: Tokens of a request. None: the model's context.
        num_sms: SMs of every operator. None: all that its stream's partition has.
        rungs: Rungs to capture decode graphs for; None among them is the whole device. Others
            are captured by a `step` that finds nothing to do. None: all.
        graph_limit_bytes: Limit of the memory of decode graphs.
        tokenizer, seed, preemption, impatient, stall_timeout_s, timeline: See `Multiplexer`.

    Raises:
        ArgumentError: settings that cannot be, a pool of another device or model, or a part of a
            model that several GPUs share.

    Example:
        >>> import smkern, torch
        >>> from smkern.kv import KvPool, KvSizes
        >>> from smkern.models import Decoder, SamplingParams, Weights, preset
        >>> config = preset("qwen3-8b").replace(
        ...     num_layers=2, hidden_size=64, num_q_heads=2, num_kv_heads=1, intermediate_size=96,
        ...     vocab_size=32, max_position=64, dtype=torch.float32)
        >>> sizes = KvSizes(2, num_kv_heads=1, head_dim=config.head_dim, dtype=config.dtype)
        >>> pool = KvPool(sizes, num_pages=32, device="cpu")
        >>> mux = smkern.serve(
        ...     Decoder(config, Weights.random(config)), pool, max_running=4, max_tokens=64)
        >>> greedy = SamplingParams(max_new_tokens=5, ignore_eos=True)
        >>> handles = [mux.submit([1, 2, 3], greedy), mux.submit([4, 5], greedy)]
        >>> sorted(output.id for output in mux.run())
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
        >>> len(handles[0].tokens), mux.stats().tokens, mux.close()
        (5, 10, None)
    """
    if is_summed(model):
        raise ArgumentError(
            "serve() of one rank's part of a model: the other ranks must launch the same; call "
            "smkern.runtime.serve_ranks on all of them, or take LLM(tp=)"
        )
    executor = ModelExecutor(
        model,
        pool,
        ladder=ladder,
        device=device,
        max_running=max_running,
        max_prefill=max_prefill,
        max_tokens=max_tokens,
        max_context=max_context,
        num_sms=num_sms,
        graph_limit_bytes=graph_limit_bytes,
    )
    mux = Multiplexer(
        executor,
        policy=policy,
        tokenizer=tokenizer,
        seed=seed,
        preemption=preemption,
        batch_invariant=model.batch_invariant,
        impatient=impatient,
        stall_timeout_s=stall_timeout_s,
        timeline=timeline,
    )
    if model.device.type == "cuda":
        executor.warm()
        executor.capture(rungs)
    return mux
