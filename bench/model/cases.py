"""What the model suite measures: models, batches, partitions, and the limits of their times."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from smkern.bench.model.floor import Forward
from smkern.bench.suite import known_names
from smkern.models.config import ModelConfig
from smkern.models.presets import preset
from smkern.models.quantization import Kind, Quantization

CONTEXT = 2048
SHORTER = 4
"""Prompts that share a forward with as many tokens as one."""
BATCHES = (1, 32, 64, 128)
DECODE_BUDGETS = (16, 24, 32, 48, 132)
PREFILL_BUDGETS = (60, 84, 100, 116, 132)
QUICK_BUDGETS = (16, 132)

LIMITS = {16: 1.60, 24: 1.50, 32: 1.45, 48: 1.25, 132: 1.20}
"""Limit of a decode step's time over its floor, by SMs."""
SINGLE_LIMIT = {132: 1.30}
"""The same at batch 1, where it differs."""


def limit_of(num_sms: int, batch: int) -> float | None:
    """The time over its floor that a decode step may take; None where nothing is promised."""
    if batch == 1 and num_sms in SINGLE_LIMIT:
        return SINGLE_LIMIT[num_sms]
    return LIMITS.get(num_sms)


@dataclass(frozen=True, slots=True)
class DecodeCase:
    """A step of `batch` requests, one token each, that have `context` keys with the new one.

    `beside` is what runs on the complement; `overlap`, whether kernels may overlap their
    neighbours in the stream (programmatic dependent launch).
    """

    model: str
    batch: int
    context: int = CONTEXT
    beside: str | None = None
    overlap: bool = True

    @property
    def forward(self) -> Forward:
        return Forward(self.batch, 1, self.context)

    @property
    def about(self) -> dict[str, Any]:
        """The `case` of a results cell."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """A prompt of `tokens` tokens with nothing cached; `batch` of them."""

    model: str
    tokens: int
    batch: int = 1
    beside: str | None = None
    overlap: bool = True

    @property
    def forward(self) -> Forward:
        return Forward(self.batch, self.tokens, self.tokens)

    @property
    def about(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What is measured of one model: decode batches and a prompt, each in its budgets.

    `kind` quantizes the preset's linear layers; a cache is of the model's dtype, or of fp8. What a
    preset's name does not say of it stands behind a "+".
    """

    model: str
    batches: tuple[int, ...]
    tokens: int
    decode_budgets: tuple[int, ...] = DECODE_BUDGETS
    prefill_budgets: tuple[int, ...] = PREFILL_BUDGETS
    kind: Kind | None = None
    fp8_cache: bool = False

    @property
    def config(self) -> ModelConfig:
        """The model that its name says, quantized where `kind` does."""
        found = preset(self.model.partition("+")[0])
        if self.kind is None:
            return found
        return found.replace(quantization=Quantization(self.kind))

    def in_fp8(self, kind: Kind) -> ModelPlan:
        """The same with fp8 weights, by another name."""
        return replace(self, model=f"{self.model}+{kind}", kind=kind)

    def with_fp8_cache(self) -> ModelPlan:
        """The same with an fp8 cache, by another name."""
        return replace(self, model=f"{self.model}+fp8-kv", fp8_cache=True)

    @property
    def beside_decode(self) -> str:
        """What a decode step has beside it."""
        return f"prefill 1x{self.tokens}"

    def beside_prefill(self, batch: int) -> str:
        """What a prefill has beside it."""
        return f"decode {batch}x{CONTEXT}"

    @property
    def prompt(self) -> PrefillCase:
        return PrefillCase(self.model, self.tokens)

    @property
    def prompts(self) -> tuple[PrefillCase, ...]:
        """The prompt, and as many tokens of `SHORTER` prompts."""
        return self.prompt, PrefillCase(self.model, self.tokens // SHORTER, SHORTER)

    def within(self, budgets: Iterable[int]) -> ModelPlan:
        """The same in those of its budgets that are among `budgets`."""
        kept = set(budgets)
        return replace(
            self,
            decode_budgets=tuple(n for n in self.decode_budgets if n in kept),
            prefill_budgets=tuple(n for n in self.prefill_budgets if n in kept),
        )


PLANS = (ModelPlan("qwen3-8b", BATCHES, 8192), ModelPlan("qwen3-32b", (64,), 4096))
_FP8_PLANS = (
    ModelPlan("qwen3-8b-fp8", (1, 64), 8192),
    ModelPlan("qwen3-32b-fp8", (1, 64), 4096),
    ModelPlan("qwen3-30b-a3b-fp8", (1, 64), 8192),
    ModelPlan("qwen3-8b", (1, 64), 8192).in_fp8("fp8-channel"),
    ModelPlan("qwen3-8b", (1, 64), 8192).in_fp8("fp8-tensor"),
)
MORE_PLANS = (
    ModelPlan("llama-3.1-8b", (1, 64), 8192),
    ModelPlan("mistral-nemo", (1, 64), 8192),
    ModelPlan("qwen2.5-7b", (1, 64), 8192),
    ModelPlan("qwen3-14b", (1, 64), 8192),
    ModelPlan("qwen3-30b-a3b", (1, 64), 8192),
    *_FP8_PLANS,
    *(plan.with_fp8_cache() for plan in _FP8_PLANS),
)
"""Measured where they are named."""
QUICK_PLANS = (ModelPlan("qwen3-8b", (1, 64), 8192, QUICK_BUDGETS, (116, 132)),)


def plans_named(names: str | Iterable[str]) -> tuple[ModelPlan, ...]:
    """The plans of some models.

    Raises:
        UnknownNameError: a model that has no plan.
    """
    known = {plan.model: plan for plan in (*PLANS, *MORE_PLANS)}
    return tuple(known[name] for name in known_names(names, known, "model"))
