"""What a rank does in a forward that a single GPU need not: sums of parts over the ranks."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from smkern import ops
from smkern.models.step import Step
from smkern.models.tensor_parallel import Collective, TensorParallel
from smkern.models.weights import Weights


def agree_on_model(
    tp: TensorParallel, weights: Weights, max_position: int, batch_invariant: bool
) -> None:
    """Compare what the ranks were given.

    Of the weights, the sizes and a hash of the norms: those are everybody's.

    Raises:
        RankError: on every rank, naming what differs.
    """
    tp.agree_on_host(weights.embed.device)
    found = hashlib.blake2b(digest_size=8)
    for layer in weights.layers:
        for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm):
            if norm is not None:
                found.update(_bytes(norm))
    found.update(_bytes(weights.final_norm))
    tp.agree(
        {
            "config": weights.config,
            "the hash of the norms": found.hexdigest(),
            "max_position": max_position,
            "batch_invariant": batch_invariant,
        }
    )


def lane_of(tp: TensorParallel, step: Step) -> Collective:
    """The sums of a step: prompts, also with rows that decode beside them, have their own."""
    return tp.decode if step.cu_q_lens is None else tp.prefill


def embed_part(tp: TensorParallel, table: Tensor, step: Step) -> None:
    """Rows of the embedding into `hidden`: those that this rank has, and zeros, over all ranks.

    One rank has each row, so the sum is exact.

    Args:
        tp: The ranks.
        table: This rank's rows of the embedding.
        step: The step; its `normed` is not read before a layer writes it.
    """
    b, ids = step.buffers, step.token_ids
    room = b.normed.view(-1).view(ids.dtype)[: ids.shape[0]]
    torch.sub(ids, tp.rank * table.shape[0], out=room)
    ops.embedding(room, table, out=b.hidden, num_sms=step.num_sms)
    lane_of(tp, step).all_reduce(b.hidden)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
