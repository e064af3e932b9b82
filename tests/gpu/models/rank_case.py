"""A rank on a GPU of its own: sums by one kernel against fp64, a model's part against the whole."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

import smkern
from smkern.models import Decoder, ModelConfig, TensorParallel, Weights
from smkern.models.copied_sums import LEAST_ROWS, MOST_ROWS, CopiedSums
from smkern.models.fused_sums import fuse_sums
from smkern.models.peer_sums import PeerSums
from tests.gpu.models.support import ALL_WIDE, TEXTS, WIDE
from tests.models.peers import error, make_peer, prompts
from tests.models.session import Session

STEPS = 8
SMS = (24, 32)
ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


ROWS = (1, 3, 64, 256, 700)
MAX_ROWS = 400
"""Of a launch: the longest of `ROWS` takes two."""
VOCAB = 2 * 12_024
LOGIT_ROWS = 16


def sums(hidden: int, dtype: torch.dtype) -> dict[str, Any]:
    """Worst errors over rows and grids, in ulps at 1; whether bits are equal everywhere, whatever
    the rows beside a row; whether all columns are gathered."""
    tp = TensorParallel.from_env(2, "cuda", timeout_s=30)
    device = torch.device("cuda", torch.cuda.current_device())
    one = CopiedSums(
        tp, tp.decode, hidden, VOCAB, dtype, device, max_rows=MAX_ROWS, longer=True,
        logit_rows=LOGIT_ROWS,
    )  # fmt: skip
    worst, equal, gathered, copied = 0.0, True, True, True
    with smkern.ladder([24]) as ladder:
        for stream in (torch.cuda.Stream(), *(side.stream for side in ladder.split(decode=24))):
            for rows in ROWS:
                found, error_ = _sums_of(one, tp.rank, rows, hidden, dtype, stream)
                worst = max(worst, error_)
                equal &= len(set(tp.everyones(_digest(found)))) == 1
            for rows in (1, LOGIT_ROWS, 2 * LOGIT_ROWS + 1):
                gathered &= _gathered(one, tp.rank, rows, dtype, stream)
            for rows in (LEAST_ROWS, 2500, MOST_ROWS):
                copied &= _in_pieces(one, tp.rank, rows, hidden, dtype, stream)
    one.close()
    return {"worst": worst, "equal": equal, "gathered": gathered, "copied": copied}


def _digest(x: Tensor) -> str:
    """Of a tensor's bits."""
    return hashlib.blake2b(x.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def _gathered(one: PeerSums, rank: int, rows: int, dtype: torch.dtype, stream: Any) -> bool:
    """Whether all columns are here, three times over, and nothing behind the rows is written."""
    generator = torch.Generator("cuda").manual_seed(rows)
    want = torch.randn(rows, VOCAB, device="cuda", generator=generator).to(dtype)
    half = VOCAB // 2
    is_right = True
    for turn in range(3):
        x = torch.full((rows + 1, VOCAB), float("nan"), device="cuda", dtype=dtype)
        own = range(rank * half, (rank + 1) * half)
        x[:rows, own.start : own.stop] = want[:, own.start : own.stop] + turn
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            one.gather(x[:rows], own)
        torch.cuda.synchronize()
        is_right &= torch.equal(x[:rows], want + turn) and bool(x[rows].isnan().all())
    return is_right


def _sums_of(
    one: PeerSums, rank: int, rows: int, hidden: int, dtype: torch.dtype, stream: Any
) -> tuple[Tensor, float]:
    """residual and norm behind three calls of each kind, all of the same bits; the worst error."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    xs = [drawn(rows, hidden).to(dtype) for _ in range(2)]
    residual, weight = drawn(rows, hidden).mul(4).to(dtype), (1 + 0.1 * drawn(hidden)).to(dtype)
    last = rows - 1  # alone, as beside the others
    before = residual.double() + xs[0].double() + xs[1].double()
    runs: list[Tensor] = []
    for _ in range(3):
        x, added, summed = xs[rank].clone(), residual.clone(), xs[rank].clone()
        y, alone = xs[rank].clone(), residual.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            one.add_rms_norm(x, added, weight, eps=1e-6)
            one.add(y, alone)
            one.all_reduce(summed)
        torch.cuda.synchronize()
        assert torch.equal(added, alone)
        runs.append(torch.stack([added, x, summed]))
    x, added = xs[rank][last:].clone(), residual[last:].clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        one.add_rms_norm(x, added, weight, eps=1e-6)
    torch.cuda.synchronize()
    assert torch.equal(runs[0][:2, last:], torch.stack([added, x]))
    assert all(torch.equal(runs[0], run) for run in runs)
    added, normed, summed = runs[0].double()
    scale = torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + 1e-6)
    wanted = (before, added * scale * weight.double(), xs[0].double() + xs[1].double())
    errors = [
        ((got - want).abs() / want.abs().clamp_min(0.1)).max().item() / ULP[dtype]
        for got, want in zip((added, normed, summed), wanted, strict=True)
    ]
    return runs[0], max(errors)


def _in_pieces(
    one: CopiedSums, rank: int, rows: int, hidden: int, dtype: torch.dtype, stream: Any
) -> bool:
    """Whether rows that are copied, layer upon layer, are those that the kernel sends."""
    generator = torch.Generator("cuda").manual_seed(rows + rank)
    weight = torch.ones(hidden, device="cuda", dtype=dtype)
    is_right = True
    for turn in range(3):
        x = torch.randn(rows, hidden, device="cuda", generator=generator).to(dtype)
        whole, residual = x.clone(), torch.full_like(x, turn)
        added = residual.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            one.add_rms_norm(whole, residual, weight, eps=1e-6)
            one.add(whole, residual)
            pieces = one.pieces(rows)
            for piece in pieces:
                one.send(x[piece])
            for piece in pieces:
                one.add_rms_norm(x[piece], added[piece], weight, eps=1e-6)
                one.send(x[piece])
            for piece in pieces:
                one.add(x[piece], added[piece])
        torch.cuda.synchronize()
        is_right &= len(pieces) == 2 and torch.equal(added, residual)
    return is_right


def logits(how: str, family: str) -> dict[str, Any]:
    """Errors of a part of four layers of 8B against fp32, beside the whole's; bits."""
    tp = TensorParallel.from_env(2, "cuda", timeout_s=60)
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(11)
    peer = make_peer(family, device="cuda", **ALL_WIDE | WIDE[family])
    config = ModelConfig.from_hf(peer.model.config).replace(dtype=torch.bfloat16)
    state, texts = peer.model.state_dict(), prompts(TEXTS, config.vocab_size)
    want = peer.last_logits(texts, torch.float32)
    whole = Decoder(config, Weights.from_tensors(config, state, device=device))
    alone = error(_logits(whole, texts)[0], want, family)
    del whole
    weights = Weights.from_tensors(config, state, device=device, shard=tp.shard)
    part = Decoder(config, weights, tp=tp, batch_invariant=True)
    if how == "one kernel":
        assert fuse_sums(part)
    runs = [_logits(part, texts) for _ in range(2)]
    sides = [_on(part, texts, side) for side in _sides()]
    ours = tp.everyones(runs[0].cpu())
    return {
        "alone": alone,
        "part": error(runs[0][0], want, family),
        "equal": all(torch.equal(runs[0], x) for x in (runs[1], *(y.to(device) for y in ours))),
        "equal on sides": all(torch.equal(runs[0][0], x) for x in sides),
    }


def _logits(decoder: Decoder, texts: list[list[int]]) -> Tensor:
    """Of prompts, and of greedy decode steps behind them."""
    with torch.inference_mode():
        session = Session.make(decoder, len(texts), 832)
        found = [session.logits(texts)]
        for _ in range(STEPS):
            drawn = found[-1].argmax(-1).tolist()
            found.append(session.logits([[token] for token in drawn], ragged=False))
        return torch.stack(found)


def _sides() -> list[Any]:
    """Sides of splits, which stay open."""
    ladder = smkern.ladder(SMS)
    return [side for n in SMS for side in ladder.split(decode=n)]


def _on(decoder: Decoder, texts: list[list[int]], side: Any) -> Tensor:
    with torch.inference_mode():
        step = Session.make(decoder, len(texts), 832).step(texts).planned(num_sms=side.num_sms)
        torch.cuda.synchronize()
        with side:
            decoder.forward(step)
        side.synchronize()
        return step.buffers.logits.float().clone()
