"""What attention is, a query and a head at a time."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
from torch import Tensor


def attention_by_hand(
    q: Tensor, keys: Iterable[Tensor], values: Iterable[Tensor], spans: Iterable[range], *,
    causal: bool = True, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out and log-sum-exps [tokens, q_heads] in fp64; zeros and -inf where nothing is seen.

    Args:
        keys, values: Of each request, [kv_len, kv_heads, head_dim].
        spans: The tokens of each request among those of q.
    """
    q = q.double()
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:2], -inf)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    scale *= 1.0 if k_scale is None else float(k_scale)
    for span, k, v in zip(spans, keys, values, strict=True):
        k, v = k.double(), v.double() * (1.0 if v_scale is None else float(v_scale))
        group = q.shape[1] // k.shape[1]
        for token in span:
            position = len(k) - len(span) + token - span.start
            begin = max(position - window + 1, 0) if window else 0
            end = max(position + 1, 0) if causal else len(k)
            for head in range(q.shape[1]):
                scores = scale * (k[begin:end, head // group] @ q[token, head])
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                logits = (
                    scores if sinks is None else torch.cat([scores, sinks[head, None].double()])
                )
                if len(logits):
                    lse[token, head] = logits.logsumexp(0)
                    shares = logits.softmax(0)[: len(scores)]
                    out[token, head] = shares @ v[begin:end, head // group]
    return out, lse
