"""The sums of both lanes by kernels of ours, where GPUs reach each other's memory."""

from __future__ import annotations

from smkern.errors import ArgumentError, DeviceError, RankError
from smkern.models.copied_sums import CopiedSums
from smkern.models.decoder import Decoder
from smkern.models.peer_sums import LOGIT_ROWS, MAX_ROWS, PAIR_ROWS, PeerSums


def fuse_sums(model: Decoder) -> bool:
    """Let the sums of both lanes be one kernel's where it serves them; otherwise they stay.

    Between two GPUs it serves all, and layers of 2,049 to 8,192 rows of prompts go in two pieces:
    copy engines bring what one has computed while products of the other run. Among more of them
    prompts of over 256 rows stay NCCL's, unless the decoder is batch-invariant: then one kernel
    must sum a request's rows in whatever batch.

    Args:
        model: This rank's part, made with `tp`, on its GPU; all ranks call this.

    Returns:
        Whether they are.

    Raises:
        ArgumentError: a model that one GPU has whole.

    Example:
        >>> fuse_sums(Decoder(config, weights, tp=tp))                         # doctest: +SKIP
        True
    """
    tp, config = model.tp, model.config
    if tp is None:
        raise ArgumentError("a model that one GPU has whole has no sums: leave fuse_sums out")
    made: list[PeerSums] = []
    rows = {"decode": MAX_ROWS, "prefill": PAIR_ROWS if tp.size == 2 else MAX_ROWS}
    try:
        for lane, instead in (("decode", tp.decode), ("prefill", tp.prefill)):
            kind = CopiedSums if lane == "prefill" and tp.size == 2 else PeerSums
            sums = kind(
                tp, instead, config.hidden_size, config.vocab_size, config.dtype, model.device,
                max_rows=rows[lane], longer=tp.size == 2 or model.batch_invariant,
                logit_rows=LOGIT_ROWS[lane],
            )  # fmt: skip
            made.append(sums)
    except (ArgumentError, DeviceError, RankError):  # on all ranks, or on none
        for sums in made:
            sums.close()
        return False
    tp.decode, tp.prefill = made
    return True
