"""The sizes of a model that its costs follow from: plain numbers, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from smkern.errors import ArgumentError
from smkern.tuning.cells import checked

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A mixture of experts: how many, how many a token takes, and the width of one."""

    num_experts: int
    top_k: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What `smkern.latency.cost` reads of a `ModelConfig`, by the same names.

    `linear_bytes` are those of a number in a linear layer's weight; tables of bf16 leave it out.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    q_size: int
    kv_size: int
    qkv_size: int
    head_dim: int
    vocab_size: int
    moe: ExpertSizes | None = None
    linear_bytes: int = 2

    @classmethod
    def of(cls, config: ModelConfig | ModelSizes) -> ModelSizes:
        """The sizes of a model."""
        names = [item.name for item in fields(cls) if item.name != "moe"]
        moe = config.moe
        if moe is not None:
            moe = ExpertSizes(moe.num_experts, moe.top_k, moe.intermediate_size)
        return cls(**{name: getattr(config, name) for name in names}, moe=moe)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelSizes:
        """The sizes in a table; KeyError, TypeError or ValueError where there are none."""
        rest = dict(values)
        moe = rest.pop("moe", None)
        made = replace(checked(cls, rest), moe=None if moe is None else checked(ExpertSizes, moe))
        if made.linear_bytes not in (1, 2):
            raise ValueError(f"{made} has weights of {made.linear_bytes} bytes")
        if min(made.num_layers, made.hidden_size, made.head_dim, made.q_size, made.kv_size) < 1:
            raise ValueError(f"{made} has sizes of 0")
        if made.q_size % made.head_dim or made.kv_size % made.head_dim:
            raise ValueError(f"{made} has no whole number of heads of {made.head_dim}")
        return made

    def sharded(self, tp: int) -> ModelSizes:
        """A GPU's part of the model where `tp` of them share it: heads, widths and vocabulary.

        KV heads of which there are fewer than GPUs go to several.

        Raises:
            ArgumentError: some of these cannot be shared evenly.
        """
        widths = {
            name: getattr(self, name) for name in ("q_size", "intermediate_size", "vocab_size")
        }
        heads = self.kv_size // self.head_dim
        uneven = tp < 1 or (heads % tp and tp % heads) or self.q_size // self.head_dim % tp
        if uneven or any(width % tp for width in widths.values()):
            raise ArgumentError(
                f"tp={tp} does not divide {heads} key heads and {widths}: take one that does"
            )
        kv_size = max(heads // tp, 1) * self.head_dim
        parts = {name: width // tp for name, width in widths.items()}
        parts |= {"kv_size": kv_size, "qkv_size": parts["q_size"] + 2 * kv_size}
        moe = self.moe and replace(self.moe, intermediate_size=self.moe.intermediate_size // tp)
        return replace(self, moe=moe, **parts)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        if self.linear_bytes == 2:
            del values["linear_bytes"]
        return {name: value for name, value in values.items() if value is not None}
