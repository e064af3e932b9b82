"""A token of every row of logits: by smkern, by torch with a sort, by FlashInfer without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

import smkern
from smkern.bench.ops.cases import OpCase
from smkern.bench.ops.rivals import Rivals, Step, random_of

TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.95
GREEDY_EVERY = 8
"""One row in so many is greedy; a row alone is not."""
SLACK = 1e-3
"""Tolerance of top-p's mass, as peers sum in another order."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What each row asks for, [batch]: a temperature of 0 is greedy."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    steps: Tensor

    @classmethod
    def of(cls, batch: int, device: str) -> Settings:
        temperature = torch.full((batch,), TEMPERATURE, device=device)
        temperature[GREEDY_EVERY - 1 :: GREEDY_EVERY] = 0.0
        return cls(
            temperature,
            torch.full((batch,), TOP_K, dtype=torch.int32, device=device),
            torch.full((batch,), TOP_P, device=device),
            torch.arange(batch, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )

    def first(self, rows: int) -> Settings:
        """The settings of the first rows."""
        return Settings(*(getattr(self, field.name)[:rows] for field in fields(self)))

    def draw(self, logits: Tensor, out: Tensor) -> Tensor:
        """Draw a token a row with smkern, into `out`, [batch] int32."""
        drawn: Tensor = smkern.sample(
            logits,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seeds=self.seeds,
            steps=self.steps,
            out=out,
        )
        return drawn

    @property
    def divisor(self) -> Tensor:
        """[batch, 1]: the temperature, 1 for greedy rows, which peers sample with a top-k of 1."""
        return torch.where(self.temperature > 0, self.temperature, 1.0)[:, None]

    @property
    def at_most(self) -> Tensor:
        """[batch] int32: the top-k, 1 for greedy rows."""
        return torch.where(self.temperature > 0, self.top_k, 1)


def torch_sample(divisor: Tensor, at_most: Tensor, top_p: Tensor) -> Step:
    """The usual sequence: sort, mask, softmax, and the exponential way to draw."""
    last, mass = (at_most.long() - 1)[:, None], top_p[:, None]

    def step(logits: Tensor, out: Tensor) -> Sequence[Tensor]:
        values, order = (logits.float() / divisor).sort(-1, descending=True)
        values = values.masked_fill(values < values.gather(1, last), float("-inf"))
        probs = values.softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs > mass, 0.0)
        drawn = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return (order.gather(1, drawn).squeeze(1).int(),)

    return step


def flashinfer_steps(module: Any, settings: Settings) -> dict[str, Step]:
    """Its two ways: its softmax with a temperature, then the joint draw; or its masks in turn."""
    sampling, temperature = module.sampling, settings.divisor.squeeze(1).contiguous()
    at_most, top_p = settings.at_most, settings.top_p
    divisor = settings.divisor

    def joint(logits: Tensor, out: Tensor) -> Sequence[Tensor]:
        probs = sampling.softmax(logits.float(), temperature)
        return (
            sampling.top_k_top_p_sampling_from_probs(
                probs, at_most, top_p, filter_apply_order="joint", seed=7, offset=0
            ),
        )

    def in_turn(logits: Tensor, out: Tensor) -> Sequence[Tensor]:
        return (
            sampling.top_k_top_p_sampling_from_logits(
                logits.float() / divisor, at_most, top_p, seed=7, offset=0
            ),
        )

    return {"flashinfer": joint, "flashinfer:logits": in_turn}


def sample(case: OpCase, flashinfer: Any, device: str) -> Rivals:
    random = random_of(device, 7)
    batch, vocab = case["batch"], case["vocab"]
    settings = Settings.of(batch, device)
    sets = [
        (
            random(batch, vocab, scale=4.0),
            torch.full((batch,), -1, dtype=torch.int32, device=device),
        )
        for _ in range(case.num_sets)
    ]

    def ours(logits: Tensor, out: Tensor) -> Sequence[Tensor]:
        return (settings.draw(logits, out),)

    steps = {} if flashinfer is None else flashinfer_steps(flashinfer, settings)
    sequence = torch_sample(settings.divisor, settings.at_most, settings.top_p)
    logits, out = sets[0]
    return Rivals(
        sets, ours, sequence, steps, undo=lambda: out.fill_(-1), judge=judge_of(logits, settings)
    )


def judge_of(logits: Tensor, settings: Settings) -> Callable[[Sequence[Tensor]], str | None]:
    """Whether every token is one that its row may draw: among the top-k, within the top-p mass."""
    scaled = logits.float() / settings.divisor
    values, order = scaled.sort(-1, descending=True)
    kth = values.gather(1, settings.at_most.long()[:, None] - 1)
    probs = values.masked_fill(values < kth, float("-inf")).softmax(-1)
    before = probs.cumsum(-1) - probs
    allowed = (probs > 0) & (before <= settings.top_p[:, None] + SLACK)
    least = values.masked_fill(~allowed, float("inf")).amin(-1)

    def judge(results: Sequence[Tensor]) -> str | None:
        tokens = results[0].long()
        if tokens.shape != (len(scaled),) or bool(
            ((tokens < 0) | (tokens >= order.shape[1])).any()
        ):
            return f"wrong result: tokens of shape {tuple(tokens.shape)}, or outside the vocabulary"
        drawn = scaled.gather(1, tokens[:, None]).squeeze(1)
        outside = int((drawn < least).sum())
        return (
            f"wrong result: {outside} of {len(tokens)} tokens that are cut off" if outside else None
        )

    return judge
