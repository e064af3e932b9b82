"""What attention must give: dense softmax in float64, and how far a kernel may be from it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from tests.gpu.attention.cases import GUARD, Case, Step


@dataclass(frozen=True, slots=True)
class Truth:
    """fp64 [tokens, q_heads, head_dim] and [tokens, q_heads]; NaN in tokens of no request.

    `magnitude` is sum p |v|, what rounding the probabilities is relative to; `largest` the largest
    |v| of the request; `score_error` how far fp32 sums in tensor cores may leave a logit.
    """

    out: Tensor
    lse: Tensor
    magnitude: Tensor
    largest: Tensor
    score_error: Tensor


def visible(case: Case, q_len: int, kv_len: int, device: torch.device) -> Tensor:
    """[q_len, kv_len] bool: which keys each query token of a request sees."""
    position = kv_len - q_len + torch.arange(q_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    if case.causal:
        seen &= key <= position
    if case.window is not None:
        seen &= key > position - case.window
    return seen


def truth(step: Step) -> Truth:
    """The right answer, from the dense keys and values; pages are not looked at."""
    case, device = step.case, step.q.device
    wide = torch.full(step.q.shape, float("nan"), dtype=torch.float64, device=device)
    narrow = wide[..., 0]
    found = Truth(wide, narrow.clone(), wide.clone(), narrow.clone(), narrow.clone())
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    k_scale = 1.0 if step.k_scale is None else float(step.k_scale)
    v_scale = 1.0 if step.v_scale is None else float(step.v_scale)
    start = 0
    for request, q_len in enumerate(case.queries):
        rows = slice(start, start + q_len)
        start += q_len
        kv_len = len(step.keys[request])
        group = case.q_heads // case.kv_heads
        q = step.q[rows].double()
        k = step.keys[request].double().repeat_interleave(group, 1)
        v = step.values[request].double().repeat_interleave(group, 1) * v_scale
        scores = torch.einsum("qhd,khd->qhk", q, k) * (scale * k_scale)
        terms = torch.einsum("qhd,khd->qhk", q.abs(), k.abs()) * abs(scale * k_scale)
        found.score_error[rows] = 2**-18 * terms.amax(-1) if kv_len else 0.0
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        seen = visible(case, q_len, kv_len, device)
        scores = scores.masked_fill(~seen[:, None], -inf)
        if step.sinks is not None:
            sinks = step.sinks.double().view(1, -1, 1).expand(q_len, -1, 1)
            scores = torch.cat([scores, sinks], -1)
        lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.sum(-1) - inf
        p = torch.exp(scores - lse.masked_fill(lse == -inf, 0.0)[..., None])[..., :kv_len]
        found.out[rows] = torch.einsum("qhk,khd->qhd", p, v)
        found.lse[rows] = lse
        found.magnitude[rows] = torch.einsum("qhk,khd->qhd", p, v.abs())
        found.largest[rows] = v.abs().amax((0, 2)) if kv_len else 0.0
    return found


def tolerance(want: Truth, dtype: torch.dtype) -> Tensor:
    """How far an output may be from the truth, element by element.

    One rounding of the probabilities and one of the result, half a unit each; what the logits'
    errors make of the probabilities; what fp16 probabilities lose below 2^-14.
    """
    half = torch.finfo(dtype).eps / 2
    return (
        1.02 * half * (want.magnitude + want.out.abs())
        + (1e-4 + 2 * want.score_error[..., None]) * want.magnitude
        + 2**-14 * want.largest[..., None]
    )


def check(step: Step, out: Tensor | None = None, lse: Tensor | None = None) -> None:
    """Hold a step's outputs (or others of its shape) against the truth, and frames against writes.

    Tokens of no request must be left as they were: NaN.
    """
    want = truth(step)
    framed = out is None
    out = step.out if out is None else out
    lse = step.lse if lse is None else lse
    owned = sum(step.case.queries)
    error = (out[:owned].double() - want.out[:owned]).abs()
    _first_wrong(step, "out", ~(error <= tolerance(want, out.dtype)[:owned]), out, want.out)
    found, right = lse[:owned].double(), want.lse[:owned]
    near = 5e-5 + 1e-6 * right.abs() + want.score_error[:owned]
    close = (found - right).abs() <= near
    _first_wrong(step, "lse", ~(close | (found == right)), lse, want.lse)
    if framed:
        assert out[owned:].isnan().all(), f"{step.case}: wrote tokens of no request"
        assert lse[owned:].isnan().all(), f"{step.case}: wrote the lse of no request"
        for frame in (step.out_frame, step.lse_frame):
            outside = torch.cat([frame[:GUARD], frame[-GUARD:]])
            assert outside.isnan().all(), f"{step.case}: wrote outside of its outputs"


def _first_wrong(step: Step, name: str, wrong: Tensor, got: Tensor, want: Tensor) -> None:
    if not wrong.any():
        return
    at = tuple(wrong.nonzero()[0].tolist())
    tokens = wrong.flatten(1).any(1).nonzero().flatten().tolist()
    raise AssertionError(
        f"{step.case} (seed {step.seed}): {int(wrong.sum())} of {wrong.numel()} of {name} wrong, "
        f"in {len(tokens)} tokens from {tokens[:8]}; first at {list(at)}: {got[at].item()} for "
        f"{want[at].item()}"
    )
