"""A decoder made of SM-aware operators, a layer at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from smkern import ops
from smkern.errors import ArgumentError, ConfigError
from smkern.models.activations import MoeBuffers, StepBuffers
from smkern.models.architecture import MoeConfig
from smkern.models.batch_invariant import check_batch_invariant
from smkern.models.config import ModelConfig
from smkern.models.layered import checked_positions, forward
from smkern.models.layers import FP8, DenseLayer, Layer, MoeLayer
from smkern.models.products import Operand, attended, attended_scale, normed, quantized
from smkern.models.shard import WHOLE, Shard
from smkern.models.step import Step
from smkern.models.tensor_parallel import Collective, TensorParallel
from smkern.models.weights import Weights


class Decoder:
    """The forward of a model; its only state is its weights, and it writes only the paged cache.

    Each method launches on the current stream, on the SMs of its partition, and returns without
    waiting; operators write into the step's buffers. On CPU tensors they run in plain torch.

    Args:
        config: The model.
        weights: Its weights, on the device to run on.
        max_position: Positions of the RoPE table. None: `config.max_position`.
        tp: The ranks that share the model; the weights are this one's part. None: one has all.
        batch_invariant: A token's bits depend on its request alone: not on the batch, the budget or
            the prompt's chunks, provided that no chunk has 8 tokens or fewer (attention's decode
            path) unless the whole prompt has. Behind 8,192 tokens attention cuts keys by the
            chunk, and bits are the same for the same chunks.

    Attributes:
        config: The model; with `tp` this rank's heads and widths, and the whole vocabulary.
        weights, tp, device, batch_invariant: As given.
        representative_layers: As of `smkern.models.layered.LayeredModel`.
        cos_sin: [max_position, rotary_dim] fp32.

    Raises:
        ConfigError: weights of another model or rank, fp32 on a GPU, or `batch_invariant` of a
            mixture of experts or on a GPU other than sm_90.
        RankError: ranks of different models, weights, options, versions or GPUs; on all of them.
        ArgumentError: `max_position` above the model's.

    Example:
        See `Step.make`.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        max_position: int | None = None,
        tp: TensorParallel | None = None,
        batch_invariant: bool = False,
    ) -> None:
        if tp is None:
            config = self._checked(config, weights, WHOLE, max_position, batch_invariant)
        else:
            config = tp.together(
                "making its decoder",
                lambda: self._checked(config, weights, tp.shard, max_position, batch_invariant),
            )
            _agree_on_model(tp, weights, self.max_position, batch_invariant)
        self.tp = tp
        self.config = config
        self.weights = weights
        self.batch_invariant = batch_invariant
        # The first norms its input and the last has no next; between them all launch the same.
        last = config.num_layers - 1
        self.representative_layers: Sequence[int] = sorted({0, min(1, last), last})
        self.cos_sin = config.rope.table(self.max_position, self.device)
        # On the device, a number each: launches of all layers are of one kind.
        given = weights.kv_scales
        self._kv_scales = None if given is None else [(layer[:1], layer[1:]) for layer in given]

    def _checked(
        self,
        config: ModelConfig,
        weights: Weights,
        shard: Shard,
        max_position: int | None,
        batch_invariant: bool,
    ) -> ModelConfig:
        """The sizes of this rank's part, once all is known to fit."""
        if not isinstance(weights, Weights):
            raise ConfigError(f"weights are a {type(weights).__name__}: pass Weights")
        if weights.shard != shard:
            raise ConfigError(
                f"weights of {weights.shard} for a decoder of {shard}: load them with "
                "shard=tp.shard, or leave tp out where they are whole"
            )
        config = shard.config(config)
        # What ends a text is no matter of weights: generation_config.json may add tokens.
        if weights.config.replace(eos_token_ids=config.eos_token_ids) != config:
            raise ConfigError(
                f"weights of {weights.config} for a decoder of {config}: load them with this "
                "configuration"
            )
        self.device = weights.embed.device
        if config.dtype is torch.float32 and self.device.type != "cpu":
            raise ConfigError(
                f"dtype=torch.float32 on {self.device}: GPU operators take torch.bfloat16 and "
                "torch.float16; load with dtype=torch.bfloat16"
            )
        if batch_invariant:
            check_batch_invariant(config, self.device)
        self.max_position = checked_positions(config, max_position)
        return config

    def embed(self, step: Step) -> Tensor:
        """Rows of the embedding into the residual stream: `step.buffers.hidden`.

        An id outside the vocabulary gives zeros.

        Raises:
            ArgumentError: requests that are longer than the table of cosines and sines.
        """
        if step.max_kv_len > self.max_position:
            raise ArgumentError(
                f"max_kv_len={step.max_kv_len}: this decoder was made for {self.max_position} "
                "positions; shorten the requests, or pass a larger max_position"
            )
        b, ids, table = step.buffers, step.token_ids, self.weights.embed
        if self.tp is not None:  # other ranks' rows are zeros; `normed` is not read before a layer
            room = b.normed.view(-1).view(ids.dtype)[: ids.shape[0]]
            ids = torch.sub(ids, self.tp.rank * table.shape[0], out=room)
        ops.embedding(ids, table, out=b.hidden, num_sms=step.num_sms)
        if self.tp is not None:  # one rank has each row: the sum is exact
            _lane_of(self.tp, step).all_reduce(b.hidden)
        return b.hidden

    def layer(self, index: int, step: Step) -> Tensor:
        """One layer: the residual stream in place, keys and values into their pages.

        The last layer of a step with `cu_q_lens` goes up to attention: behind it only each
        request's last row is needed, which `head` computes. With `tp` layers come in their order:
        each norms what the next one reads.

        Args:
            index: Layer index.
            step: `planned`; otherwise attention makes a plan in every layer.

        Returns:
            `step.buffers.hidden`.
        """
        self._attention(self.weights.layers[index], index, step)
        if index + 1 < self.config.num_layers or step.cu_q_lens is None:
            self._behind_attention(index, step.buffers, step)
        return step.buffers.hidden

    def head(self, step: Step) -> Tensor:
        """Logits [batch, vocab_size] of each request's last token, in the weights' dtype."""
        b = step.buffers if step.cu_q_lens is None else self._last_rows(step)
        num_sms, eps, norm = step.num_sms, self.config.rms_eps, self.weights.final_norm
        ops.rms_norm(b.hidden, norm, eps=eps, out=b.last_normed, num_sms=num_sms)
        out = b.logits
        if self.tp is not None:
            columns = self.tp.shard.rows(out.shape[1])
            out = out[:, columns.start : columns.stop]
        ops.gemm(
            b.last_normed, self.weights.lm_head, out=out, static_weights=True,
            batch_invariant=self.batch_invariant, num_sms=num_sms,
        )  # fmt: skip
        if self.tp is not None:
            _lane_of(self.tp, step).gather(b.logits, columns, num_sms=num_sms)
        return step.buffers.logits

    def forward(self, step: Step) -> Tensor:
        """All of a step: embed, layers, head; a plan is made where the step has none."""
        return forward(self, step)

    def _last_rows(self, step: Step) -> StepBuffers:
        """Each request's last row through the last layer behind attention, and rows of padding."""
        whole, ends = step.buffers, step.ends()
        step.last_rows()  # into the first of `ends.last_rows`; what is behind them may be any row
        pairs = [(whole.hidden, ends.hidden), (whole.attended_rows, ends.attended_rows)]
        scale, out_scale = attended_scale(whole), attended_scale(ends)
        if scale is not None and out_scale is not None:
            pairs.append((scale, out_scale))
        for x, out in pairs:
            # bytes in the model's dtype, whatever they mean
            words, into = (of.view(of.shape[0], -1).view(self.config.dtype) for of in (x, out))
            ops.embedding(ends.last_rows, words, out=into, num_sms=step.num_sms)
        self._behind_attention(self.config.num_layers - 1, ends, step)
        return ends

    def _behind_attention(self, index: int, b: StepBuffers, step: Step) -> None:
        """The rest of a layer for the rows of `b`."""
        layer, num_sms = self.weights.layers[index], step.num_sms
        if self.tp is None:
            self._output(layer, b, num_sms)
            self._mlp(layer, b, num_sms)
            return
        lane, pieces = _lane_of(self.tp, step), [b]
        if isinstance(layer, DenseLayer):  # experts sort all rows
            cut = lane.pieces(b.hidden.shape[0], num_sms)
            pieces = [b.rows(rows) for rows in cut] or pieces
        for piece in pieces:
            self._output(layer, piece, num_sms)
            lane.send(piece.normed)
        for piece in pieces:
            self._mlp(layer, piece, num_sms, lane)
            lane.send(piece.normed)
        for piece in pieces:
            if index + 1 == len(self.weights.layers):
                lane.add(piece.normed, piece.hidden, num_sms=num_sms)
            else:  # with the norm of the next layer: one pass over the rows less
                norm, eps = self.weights.layers[index + 1].input_norm, self.config.rms_eps
                lane.add_rms_norm(piece.normed, piece.hidden, norm, eps=eps, num_sms=num_sms)

    def _attention(self, layer: Layer, index: int, step: Step) -> None:
        """From the residual stream to what the heads read."""
        b, num_sms, eps = step.buffers, step.num_sms, self.config.rms_eps
        k_cache, v_cache = step.caches[index]
        k_scale, v_scale = None, None
        if self._kv_scales is not None and k_cache.dtype is FP8:
            k_scale, v_scale = self._kv_scales[index]
        if self.tp is None or index == 0:
            x, x_scale, w_scale = normed(layer.input_norm, eps, layer.scales.qkv, b, num_sms)
        else:  # the sum of the layer before has normed it
            x, x_scale, w_scale = quantized(b.normed, layer.scales.qkv, b.fp8.hidden, num_sms)
        ops.gemm(
            x, layer.qkv, bias=layer.qkv_bias, a_scale=x_scale, w_scale=w_scale, out=b.qkv,
            static_weights=True, batch_invariant=self.batch_invariant, num_sms=num_sms,
        )  # fmt: skip
        ops.qk_norm_rope_append(
            b.q, b.k, b.v, k_cache, v_cache, step.page_table, step.kv_lens,
            cos_sin=self.cos_sin, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps,
            cu_q_lens=step.cu_q_lens, k_scale=k_scale, v_scale=v_scale, out=b.q, num_sms=num_sms,
        )  # fmt: skip
        ops.paged_attention(
            b.q, k_cache, v_cache, step.page_table, step.kv_lens, cu_q_lens=step.cu_q_lens,
            max_q_len=step.max_q_len, k_scale=k_scale, v_scale=v_scale, plan=step.plan,
            out=b.attended, out_scale=attended_scale(b), num_sms=num_sms,
        )  # fmt: skip

    def _target(self, b: StepBuffers) -> tuple[Tensor | None, Tensor]:
        """What a product is added to, and where it goes: a rank's is a part of the sum, which goes
        over all ranks before the residual."""
        return (b.hidden, b.hidden) if self.tp is None else (None, b.normed)

    def _output(self, layer: Layer, b: StepBuffers, num_sms: int | None) -> None:
        """What the heads read, onto the residual stream, or a rank's part of it."""
        residual, out = self._target(b)
        x, x_scale, w_scale = attended(layer.scales.o, b, num_sms)
        ops.gemm(
            x, layer.o, residual=residual, a_scale=x_scale, w_scale=w_scale, out=out,
            static_weights=True, batch_invariant=self.batch_invariant, num_sms=num_sms,
        )  # fmt: skip

    def _mlp(
        self, layer: Layer, b: StepBuffers, num_sms: int | None, lane: Collective | None = None
    ) -> None:
        """The norm, behind the sum over ranks where there are some, and the MLP or the experts."""
        residual, out = self._target(b)
        eps = self.config.rms_eps
        # Routers and the exchange of rows are in the model's dtype.
        wide = layer.scales.gate_up if isinstance(layer, DenseLayer) else None
        if lane is None:
            operand = normed(layer.post_norm, eps, wide, b, num_sms)
        else:
            lane.add_rms_norm(b.normed, b.hidden, layer.post_norm, eps=eps, num_sms=num_sms)
            operand = quantized(b.normed, wide, b.fp8.hidden, num_sms)
        if isinstance(layer, DenseLayer):
            self._dense(layer, operand, b, residual, out, num_sms)
        else:
            assert b.moe is not None
            assert self.config.moe is not None
            _experts(layer, self.config.moe, b, b.moe, residual, out, num_sms)

    def _dense(
        self, layer: DenseLayer, operand: Operand, b: StepBuffers, residual: Tensor | None,
        out: Tensor, num_sms: int | None,
    ) -> None:  # fmt: skip
        """SwiGLU, added to the residual stream, or a rank's part of it."""
        same = self.batch_invariant
        x, x_scale, w_scale = operand
        wide, down = b.fp8.gate_up, layer.scales.down
        if wide is None:
            assert b.gated is not None
            ops.gemm_swiglu(
                x, layer.gate_up, a_scale=x_scale, w_scale=w_scale, out=b.gated,
                static_weights=True, batch_invariant=same, num_sms=num_sms,
            )  # fmt: skip
            x, x_scale, w_scale = quantized(b.gated, down, b.fp8.gated, num_sms)
        else:
            assert b.fp8.gated is not None
            assert down is not None
            into = b.fp8.gated
            ops.gemm_swiglu(
                x, layer.gate_up, a_scale=x_scale, w_scale=w_scale, out=into.values,
                out_scale=into.scale, gate_up=wide, static_weights=True, batch_invariant=same,
                num_sms=num_sms,
            )  # fmt: skip
            x, x_scale, w_scale = into.values, into.scale, down.weight
        ops.gemm(
            x, layer.down, residual=residual, a_scale=x_scale, w_scale=w_scale, out=out,
            static_weights=True, batch_invariant=same, num_sms=num_sms,
        )  # fmt: skip


def _agree_on_model(
    tp: TensorParallel, weights: Weights, max_position: int, batch_invariant: bool
) -> None:
    """Compare what the ranks were given.

    Of the weights, the sizes and a hash of the norms: those are everybody's.

    Raises:
        RankError: on every rank, naming what differs.
    """
    tp.agree_on_host(weights.embed.device)
    found = hashlib.blake2b(digest_size=8)
    for layer in weights.layers:
        for norm in (layer.input_norm, layer.q_norm, layer.k_norm, layer.post_norm):
            if norm is not None:
                found.update(_bytes(norm))
    found.update(_bytes(weights.final_norm))
    tp.agree(
        {
            "config": weights.config,
            "the hash of the norms": found.hexdigest(),
            "max_position": max_position,
            "batch_invariant": batch_invariant,
        }
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _lane_of(tp: TensorParallel, step: Step) -> Collective:
    """The sums of a step: prompts, also with rows that decode beside them, have their own."""
    return tp.decode if step.cu_q_lens is None else tp.prefill


def _experts(
    layer: MoeLayer, moe: MoeConfig, b: StepBuffers, m: MoeBuffers, residual: Tensor | None,
    out: Tensor, num_sms: int | None,
) -> None:  # fmt: skip
    """The mixture of experts, added to the residual stream, or a rank's part of it."""
    ops.gemm(b.normed, layer.router, out=m.router_logits, static_weights=True, num_sms=num_sms)
    ops.topk_softmax(
        m.router_logits, moe.top_k, renormalize=moe.renormalize, out=(m.weights, m.experts),
        num_sms=num_sms,
    )  # fmt: skip
    ops.moe_permute(
        b.normed, m.experts, moe.num_experts, out=(m.rows, m.offsets, m.index), num_sms=num_sms
    )
    wide, narrow = layer.scales.gate_up, layer.scales.down
    x, x_scale, w_scale = quantized(m.rows, wide, b.fp8.rows, num_sms)
    ops.grouped_gemm(
        x, layer.w_gate_up, m.offsets, a_scale=x_scale, w_scale=w_scale, swiglu=True, out=m.gated,
        num_sms=num_sms,
    )  # fmt: skip
    x, x_scale, w_scale = quantized(m.gated, narrow, b.fp8.gated, num_sms)
    ops.grouped_gemm(
        x, layer.w_down, m.offsets, a_scale=x_scale, w_scale=w_scale, out=m.outs, num_sms=num_sms
    )
    ops.moe_unpermute(m.outs, m.index, m.weights, residual=residual, out=out, num_sms=num_sms)
