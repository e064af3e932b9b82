"""Tokens drawn from logits into the rows of their requests."""

from __future__ import annotations

from torch import Tensor

from smkern.models.graph import DecodeInputs
from smkern.ops import sample


def draw(logits: Tensor, rows: DecodeInputs, steps: Tensor, *, num_sms: int | None = None) -> None:
    """Draw a token a row, as a decode graph does; rows that are finished keep all they have.

    Args:
        logits: [batch, vocab].
        rows: Of the same requests; `token_ids`, `kv_lens` and `finished` are written.
        steps: [batch] int32: the tokens in front of the one that is drawn.
        num_sms: SMs to use at most.
    """
    sample(
        logits,
        temperature=rows.temperature,
        top_k=rows.top_k,
        top_p=rows.top_p,
        min_p=rows.min_p,
        seeds=rows.seeds,
        steps=steps,
        finished=rows.finished,
        lengths=rows.kv_lens,
        max_lengths=rows.max_lengths,
        stop_tokens=rows.stop_tokens,
        out=rows.token_ids,
        num_sms=num_sms,
    )
