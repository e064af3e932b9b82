"""Rows for tests of the sampler, and which tokens a draw may end at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.ops.reference.sample import (
    Choice,
    Drawn,
    draw_in_piece,
    draw_kept,
    draw_piece,
    piece_size,
    plain,
)
from smkern.ops.sample.call import Sample, choices_of

SLACK = 1e-4
"""For exponentials and sums of another rounding."""
BINS = 100
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.3, "top_k": (1, 2, 5, 40, 300, 5000)},
    "top-p": {"temperature": 1.0, "top_p": (0.01, 0.3, 0.5, 0.9, 0.99, 0.999)},
    "min-p": {"temperature": 0.9, "min_p": (1.0, 0.5, 0.1, 0.01, 1e-4, 1e-7)},
    "top-k-top-p": {"temperature": 1.5, "top_k": (1, 50, 50, 900, 0, 3000), "top_p": 0.9},
    "all": {"temperature": 1.5, "top_k": (0, 3, 50, 900, 0, 5000), "top_p": 0.95, "min_p": 0.02},
    "mixed": {"temperature": (0.0, 0.7, 0.0, 2.0, 1.0, 1.0), "top_k": (0, 20, 5, 0, 0, 0),
              "top_p": (1.0, 0.9, 0.5, 1.0, 1.0, 0.9), "min_p": (0.0, 0.0, 0.0, 0.0, 0.1, 0.0)},
}  # fmt: skip
"""Parameters of six rows; more rows repeat them."""
_TYPES = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32,
          "min_p": torch.float32}  # fmt: skip


def options_of(kind: str, rows: int, device: str = "cpu") -> dict[str, Any]:
    """The parameters of a kind for so many rows, with seeds and steps of their own."""
    found: dict[str, Any] = {}
    for name, value in KINDS[kind].items():
        if isinstance(value, tuple):
            repeated = [value[i % len(value)] for i in range(rows)]
            value = torch.tensor(repeated, dtype=_TYPES[name], device=device)
        found[name] = value
    if found:
        found["seeds"] = (torch.arange(rows) * 0x9E3779B97F4A7C + 5).to(device)
        found["steps"] = (torch.arange(rows, dtype=torch.int32) * 7).to(device)
    return found


def logits_of(rows: int, vocab: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    """Random logits, on the CPU; the same for the same vocabulary."""
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(dtype)


def odd_rows(dtype: torch.dtype, vocab: int = 6000) -> Tensor:
    """[8, vocab] with what no model should give: NaN, infinities, equal and huge logits."""
    x = logits_of(8, vocab, dtype)
    x[0] = -torch.inf
    x[1] = torch.nan
    x[2, 5] = torch.nan
    x[3, 77] = x[3, 99] = torch.inf
    x[4] = -torch.inf
    x[4, vocab // 2] = -3.0
    x[5, 100:] = torch.finfo(dtype).min
    x[6] = 0.0
    x[7, ::2] = -0.0
    x[7, 1::2] = 0.0
    return x


def may_draw(logits: Tensor, choice: Choice, token: int) -> bool:
    """Whether a draw of a row, on the CPU, may end at a token, but for rounding."""
    x = plain(logits)
    if choice.greedy or x.max() == -torch.inf:
        return token == int((x == x.max()).nonzero()[0, 0])
    filtered = 0 < choice.top_k < len(x) or choice.nucleus < 1 or choice.min_log2 > -torch.inf
    if filtered:
        return _reaches(draw_kept(x, choice), token)
    size = piece_size(logits.dtype)
    piece = token // size
    return _reaches(draw_piece(x, choice, size), piece) and _reaches(
        draw_in_piece(x, choice, size, piece), token
    )


def wrong_rows(logits: Tensor, tokens: Tensor, **options: Any) -> list[tuple[int, int]]:
    """(row, token) of those that no rounding explains."""
    on_host = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    logits = logits.cpu()
    choices = choices_of(Sample(logits, **on_host))
    drawn = tokens.tolist()
    rows = enumerate(zip(logits, choices, drawn, strict=True))
    return [(row, token) for row, (x, choice, token) in rows if not may_draw(x, choice, token)]


def _reaches(drawn: Drawn, which: int) -> bool:
    """Whether a draw ends there, random numbers being uncertain by `SLACK` of the whole."""
    at = (drawn.ids == which).nonzero().flatten()
    if not len(at):
        return False
    upto = int(drawn.upto[at[0]])
    before = int(drawn.upto[at[0] - 1]) if at[0] else 0
    room = SLACK * int(drawn.upto[-1])
    return before - room <= drawn.target < upto + room


def shares_of(logits: Tensor, choice: Choice) -> Tensor:
    """[vocab] fp64: the probability of each token of a row, by the words of the documentation."""
    x = logits.double() / choice.temperature
    order = x.sort(descending=True, stable=True).indices
    shares = x.softmax(0)
    if 0 < choice.top_k < len(x):
        order = order[: choice.top_k]
    kept = shares[order] / shares[order].sum()
    order = order[: int((kept.cumsum(0) < choice.top_p).sum()) + 1]
    order = order[shares[order] >= choice.min_p * shares.max()]
    found = torch.zeros_like(x)
    found[order] = shares[order] / shares[order].sum()
    return found


def fits(tokens: Tensor, shares: Tensor) -> bool:
    """Whether tokens are as likely as they should be: chi-squared, 4.5 sigma.

    Neighbouring tokens share a bin where there are many; what cannot be drawn must not be.
    """
    counts = torch.bincount(tokens.long(), minlength=len(shares)).double()
    if counts[shares == 0].any():
        return False
    wanted = shares * len(tokens)
    room = wanted.cumsum(0) * BINS / len(tokens)
    which = room.floor().clamp(max=BINS - 1).long()
    seen = torch.zeros(BINS, dtype=torch.float64).index_add(0, which, counts)
    due = torch.zeros(BINS, dtype=torch.float64).index_add(0, which, wanted)
    seen, due = seen[due > 0], due[due > 0]
    statistic, free = float(((seen - due) ** 2 / due).sum()), max(len(due) - 1, 1)
    spread = 2 / (9 * free)
    return statistic < free * (1 - spread + 4.5 * spread**0.5) ** 3  # Wilson and Hilferty
