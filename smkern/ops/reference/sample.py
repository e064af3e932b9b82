"""Sampling in plain torch: what csrc/sample.cu draws, by a sort.

A token's weight is an integer, its share of the row in units of 2^-40 of the best token's, so that
sums do not depend on their order. The kernels draw the same token but where its bounds come within
the rounding of their exponential (2^-22) of the random number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

UNIT = 1 << 40
"""Weight of a row's best token."""
GREEDY_BELOW = 1e-5
"""Temperatures below it choose the best token."""
LEAST = -150.0
"""log2 of a share that is as good as none."""
_LOG2E = 1.4426950408889634
_GROUP_VECTORS = 8
_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Choice:
    """How one row's token is chosen; as in `smkern.sample`, clamped as on the device."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    step: int = 0

    @property
    def greedy(self) -> bool:
        return not self.temperature >= GREEDY_BELOW

    @property
    def scale(self) -> Tensor:
        """What turns logits to log2 units, fp32."""
        one = torch.tensor(_LOG2E, dtype=torch.float32)
        return one / torch.tensor(min(self.temperature, 1e30), dtype=torch.float32)

    @property
    def nucleus(self) -> float:
        """top_p as fp32, 0 to 1."""
        p = float(torch.tensor(self.top_p, dtype=torch.float32))
        return max(p, 0.0) if p < 1 else 1.0

    @property
    def min_log2(self) -> float:
        """min_p in log2 units, -inf where it is off."""
        if not self.min_p > 0:
            return -math.inf
        return float(torch.tensor(min(self.min_p, 1.0), dtype=torch.float32).log2())


class Drawn(NamedTuple):
    """A draw: tokens in the order of their ids, in which they were walked, and where it ended.

    `upto` [n] int64 is what tokens weigh up to and with each of `ids` [n]; the token is the first
    whose `upto` is above `target`.
    """

    ids: Tensor
    upto: Tensor
    target: int

    @property
    def token(self) -> int:
        return int(self.ids[int((self.upto > self.target).nonzero()[0, 0])])


def philox(seed: int, step: int) -> tuple[int, int]:
    """Two random 64-bit numbers of a seed and a step: Philox4x32-10 (Salmon et al., SC11).

    Args:
        seed: The key, as 64 bits.
        step: The counter's low word, as 32 bits.
    """
    c0, c1, c2, c3 = step & _WORD, 0, 0, 0
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c1 << 32 | c0, c3 << 32 | c2


def plain(logits: Tensor) -> Tensor:
    """Logits in fp32 as the sampler takes them: no NaN (it is -inf), +inf the largest float."""
    x = logits.float()
    most = torch.finfo(torch.float32).max
    return torch.where(x.isnan(), -math.inf, x).clamp_max(most) + 0.0


def piece_size(dtype: torch.dtype) -> int:
    """Tokens of a piece: what a warp of the kernel reads at a time."""
    return 32 * _GROUP_VECTORS * (16 // dtype.itemsize)


def weights(x: Tensor, top: Tensor, choice: Choice) -> Tensor:
    """What tokens weigh, int64, relative to logits `top`; see `UNIT`."""
    shares = _shares(x, top, choice.scale)
    return torch.where(shares < 2.0**-126, 0.0, shares).double().mul(UNIT).round().long()


def kept(x: Tensor, choice: Choice) -> Tensor:
    """Ids that the filters of a row keep, by logit, equal ones by id: top-k, top-p, then min-p.

    Args:
        x: [vocab], `plain`.
        choice: Its filters.
    """
    order = x.sort(descending=True, stable=True).indices
    if 0 < choice.top_k < len(x):
        order = order[: choice.top_k]
    top = x[order[0]]
    if choice.nucleus < 1:
        upto = weights(x[order], top, choice).cumsum(0)
        share = max(math.ceil(choice.nucleus * float(upto[-1])), 1)
        order = order[: int((upto < share).sum()) + 1]
    if choice.min_log2 > -math.inf:
        order = order[(x[order] - top) * choice.scale >= choice.min_log2]
    return order


def draw_kept(x: Tensor, choice: Choice) -> Drawn:
    """A draw with filters."""
    ids = kept(x, choice).sort().values
    upto = weights(x[ids], x.max(), choice).cumsum(0)
    return Drawn(ids, upto, philox(choice.seed, choice.step)[0] * int(upto[-1]) >> 64)


def draw_piece(x: Tensor, choice: Choice, size: int) -> Drawn:
    """The first half of a draw without filters: a piece of `size` tokens by what it weighs."""
    pieces = torch.nn.functional.pad(x, (0, -len(x) % size), value=-math.inf).view(-1, size)
    best = pieces.amax(1)
    share = torch.where(best.isinf(), 0.0, _shares(best, x.max(), choice.scale)).double()
    upto = (weights(pieces, best[:, None], choice).sum(1) * share).round().long().cumsum(0)
    target = philox(choice.seed, choice.step)[0] * int(upto[-1]) >> 64
    return Drawn(torch.arange(len(pieces)), upto, target)


def draw_in_piece(x: Tensor, choice: Choice, size: int, piece: int) -> Drawn:
    """The second half: a token of a piece, by its id."""
    ids = torch.arange(piece * size, min((piece + 1) * size, len(x)))
    upto = weights(x[ids], x[ids].max(), choice).cumsum(0)
    return Drawn(ids, upto, philox(choice.seed, choice.step)[1] * int(upto[-1]) >> 64)


def sample_row(logits: Tensor, choice: Choice) -> int:
    """One row's token; 0 where no logit is above -inf.

    Args:
        logits: [vocab], any dtype.
        choice: How.
    """
    x = plain(logits)
    if choice.greedy or x.max() == -math.inf:
        return int((x == x.max()).nonzero()[0, 0])
    filtered = 0 < choice.top_k < len(x) or choice.nucleus < 1 or choice.min_log2 > -math.inf
    if filtered:
        return draw_kept(x, choice).token
    size = piece_size(logits.dtype)
    return draw_in_piece(x, choice, size, draw_piece(x, choice, size).token).token


def sample(logits: Tensor, choices: list[Choice]) -> Tensor:
    """Tokens [batch] int32 of logits [batch, vocab], one choice a row."""
    tokens = [sample_row(row, choice) for row, choice in zip(logits, choices, strict=True)]
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


def finish_rows(
    tokens: Tensor,
    *,
    finished: Tensor | None,
    lengths: Tensor | None,
    max_lengths: Tensor | None,
    stop_tokens: Tensor | None,
    pad_token: int,
) -> Tensor:
    """Tokens with those of finished rows replaced; brings the state up to date in place.

    Args:
        tokens: [batch] as drawn.
        finished: [batch] bool or uint8, or None.
        lengths: [batch] int32 or None.
        max_lengths: [batch] int32 or None.
        stop_tokens: [batch, n] int32 or None.
        pad_token: What finished rows emit.
    """
    over = torch.zeros_like(tokens, dtype=torch.bool) if finished is None else finished != 0
    ends = torch.zeros_like(over)
    if stop_tokens is not None:
        ends |= (stop_tokens == tokens[:, None]).any(1)
    if lengths is not None:
        lengths += (~over).int()
        if max_lengths is not None:
            ends |= lengths >= max_lengths
    if finished is not None:
        finished.copy_(over | ends)
    return torch.where(over, pad_token, tokens).int()


def _shares(x: Tensor, top: Tensor, scale: Tensor) -> Tensor:
    """Shares of the best token's probability, fp32; NaN (-inf of -inf) is none."""
    t = ((x - top) * scale).nan_to_num(LEAST, math.inf, LEAST).clamp_min(LEAST)
    return t.exp2()
