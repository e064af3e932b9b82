"""A model of transformers as embed, layer(i) and head over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from smkern import ops
from smkern.errors import ArgumentError, ConfigError
from smkern.integrations.transformers.attention import Attention, register_attention
from smkern.integrations.transformers.turns import Turns
from smkern.models.config import ModelConfig
from smkern.models.layered import checked_positions
from smkern.models.step import Step

PAGED = "smkern_paged"
"""What the model's attn_implementation becomes."""
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


class Layers:
    """A causal model of transformers in parts, for a runtime that launches it a layer at a time.

    It is a `smkern.models.layered.LayeredModel`, as `smkern.models.Decoder` is one. The model's own
    modules run, also those that were swapped, adapted or quantised; attention reads and writes the
    step's pages. Parameters stay where they are, and the model goes on to work by itself: its
    attn_implementation is set to one that serves both.

    The modules allocate what they return, on the current stream. In a partition of spread SMs
    products of cuBLAS, which launch clusters, are refused by the driver: `swap_linear` first, or
    make the ladder with `atom=8`. Experts must not be read back to be captured in a graph:
    `model.set_experts_implementation("grouped_mm")`.

    Args:
        model: Such as `AutoModelForCausalLM` gives, in eval mode.
        config: Its sizes. None: what `ModelConfig.from_hf` makes of `model.config`, which refuses
            what pages and plans cannot serve, sliding windows for instance.
        max_position: Positions of the table of cosines and sines. None: `config.max_position`.

    Attributes:
        model: As given.
        config, device: Its sizes, and where its weights are.

    Raises:
        ConfigError: an architecture or module that is not served.
        ArgumentError: a model in training mode; `max_position` above the model's.
        ImportError: transformers is absent, or older than 5.17.

    Source: layer-wise prefill, MuxWise section 3.2.1.

    Example:
        >>> import torch, smkern.integrations.transformers as st
        >>> from smkern.models import ActivationBuffers, Step
        >>> from smkern.models.layered import forward
        >>> from transformers import AutoModelForCausalLM, Qwen3Config
        >>> hf = Qwen3Config(hidden_size=64, num_attention_heads=2, num_key_value_heads=1,
        ...                  num_hidden_layers=1, intermediate_size=96, vocab_size=32, head_dim=64,
        ...                  max_position_embeddings=64, pad_token_id=0, dtype="float32")
        >>> layers = st.Layers(AutoModelForCausalLM.from_config(hf).eval())
        >>> caches = [tuple(torch.zeros(2, 4, 16, 1, 64))]
        >>> step = Step.make(ActivationBuffers(layers.config, 5), token_ids=torch.arange(5),
        ...                  kv_lens=torch.tensor([3, 2]).int(), caches=caches,
        ...                  max_q_len=3, max_kv_len=16,
        ...                  cu_q_lens=torch.tensor([0, 3, 5]).int(),
        ...                  page_table=torch.tensor([[1], [2]]).int())
        >>> forward(layers, step).shape
        torch.Size([2, 32])
    """

    def __init__(
        self, model: Any, *, config: ModelConfig | None = None, max_position: int | None = None
    ) -> None:
        if model.training:
            raise ArgumentError(
                f"{type(model).__name__} is in training mode, smkern attention has no backward: "
                "call model.eval()"
            )
        if config is None:
            found = ModelConfig.from_hf(model.config)
            # Linear layers are the model's own modules, quantized or not.
            config = found.replace(dtype=model.dtype, quantization=None)
        positions = checked_positions(config, max_position)
        self.model = model
        self._parts = _parts_of(model, config)
        self._unembed: nn.Module = model.get_output_embeddings()
        self.config = config
        self.device: torch.device = model.device
        self.max_position = positions
        self.batch_invariant = False
        # modules may have been swapped, in some layers or all
        self.representative_layers: Sequence[int] = range(config.num_layers)
        _set_attention(model)
        with torch.no_grad():
            wide = torch.empty(0, dtype=config.dtype, device=self.device)
            every = torch.arange(positions, device=self.device)[None]
            cos, sin = self._parts.rotary_emb(wide, every)
        self._turns = Turns(cos[0], sin[0])

    @torch.no_grad()
    def embed(self, step: Step) -> Tensor:
        """Rows of the embedding into the residual stream: `step.buffers.hidden`.

        Raises:
            ArgumentError: requests that are longer than the table of cosines and sines.
        """
        if step.max_kv_len > self.max_position:
            raise ArgumentError(
                f"max_kv_len={step.max_kv_len}: these layers were made for {self.max_position} "
                "positions; shorten the requests, or pass a larger max_position"
            )
        hidden, module = step.buffers.hidden, self._parts.embed_tokens
        if type(module) is nn.Embedding:  # an id outside the vocabulary gives zeros
            ops.embedding(step.token_ids, module.weight, out=hidden, num_sms=step.num_sms)
        else:
            hidden.copy_(module(step.token_ids))
        self._turns.set(step)
        return hidden

    @torch.no_grad()
    def layer(self, index: int, step: Step) -> Tensor:
        """One layer: the residual stream in place, keys and values into their pages.

        Args:
            index: Index of the layer.
            step: The step given to `embed`, or one of the same numbers in the same buffers;
                `planned`, or attention makes a plan of its own.

        Returns:
            `step.buffers.hidden`.

        Raises:
            ArgumentError: `embed` was not called before.
            ConfigError: a layer whose attention is not transformers' `AttentionInterface`.
        """
        hidden = step.buffers.hidden
        turns = self._turns.get(step)
        if turns is None:
            raise ArgumentError(
                f"layer {index} of a step of {step.num_tokens} tokens in buffers that hold none: "
                "call embed(step) first"
            )
        pages = _PagesOfStep(step)
        out = self._parts.layers[index](
            hidden[None], attention_mask=None, position_embeddings=turns, past_key_values=pages,
            smkern_pages=pages,
        )  # fmt: skip
        if not pages.attended:
            raise ConfigError(
                f"{type(self._parts.layers[index]).__name__} did not come to the attention that "
                f"attn_implementation={PAGED!r} names: it calls one of its own; use a model whose "
                "layers pass their keyword arguments to transformers' AttentionInterface"
            )
        return hidden.copy_((out[0] if isinstance(out, tuple) else out)[0])

    @torch.no_grad()
    def head(self, step: Step) -> Tensor:
        """Logits [batch, vocab_size] of each request's last token, in the weights' dtype."""
        rows, hidden = step.last_rows(), step.buffers.hidden
        if rows is not None:
            hidden = hidden.index_select(0, rows)
        return step.buffers.logits.copy_(self._unembed(self._parts.norm(hidden)))


class _PagesOfStep:
    """A step's pages of the cache, as the cache that a layer writes to."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.index = 0
        self.attended = False

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """New keys and values [1, kv_heads, tokens, head_dim] into their pages."""
        step, self.index = self.step, layer_idx
        k_cache, v_cache = step.caches[layer_idx]
        k, v = (x[0].transpose(0, 1) for x in (key, value))
        ops.append_kv(
            k, v, k_cache, v_cache, step.page_table, step.kv_lens, cu_q_lens=step.cu_q_lens,
            num_sms=step.num_sms,
        )  # fmt: skip
        return key, value

    def attend(self, query: Tensor, scaling: float | None, options: dict[str, Any]) -> Tensor:
        """[1, tokens, q_heads, head_dim] of queries [1, q_heads, tokens, head_dim]."""
        if options.get("sliding_window"):
            raise ConfigError(
                f"sliding_window={options['sliding_window']} on layer {self.index}: a step's plan "
                "has none; choose a model with full attention"
            )
        step, sinks = self.step, options.get("s_aux")
        k_cache, v_cache = step.caches[self.index]
        ops.paged_attention(
            query[0].transpose(0, 1), k_cache, v_cache, step.page_table, step.kv_lens,
            cu_q_lens=step.cu_q_lens, max_q_len=step.max_q_len, scale=scaling,
            softcap=options.get("softcap") or None, sinks=None if sinks is None else sinks.float(),
            plan=step.plan, out=step.buffers.attended, num_sms=step.num_sms,
        )  # fmt: skip
        self.attended = True
        return step.buffers.attended[None]


class _PagedAttention(Attention):
    """As `Attention`, and over the pages of a step where there is one."""

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None, *args: Any, smkern_pages: _PagesOfStep | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if smkern_pages is None:
            return super().attend(module, query, key, value, attention_mask, *args, **options)
        return smkern_pages.attend(query, options.pop("scaling", None), options), None


def _set_attention(model: Any) -> None:
    register_attention(PAGED, _PagedAttention())
    model.set_attn_implementation(PAGED)


def _parts_of(model: Any, config: ModelConfig) -> Any:
    """The module that has embedding, layers, norm and rotary embedding."""
    decoder = model.get_decoder()
    missing = [name for name in _PARTS if not hasattr(decoder, name)]
    if model.get_output_embeddings() is None:
        missing.append("an output embedding")
    if missing:
        raise ConfigError(
            f"{type(model).__name__} has no {', '.join(missing)}: use a causal model such as "
            "AutoModelForCausalLM makes of Llama, Mistral and Qwen3"
        )
    if len(decoder.layers) != config.num_layers:
        raise ConfigError(
            f"{type(model).__name__} has {len(decoder.layers)} layers, its configuration "
            f"{config.num_layers}: pass the configuration of this model"
        )
    return decoder
