"""Each operator of a decode step by itself, on layer after layer's weights and caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from smkern import ops
from smkern.bench.model.model import DecodeLoop, Model, draw_of
from smkern.measure.timing import Call
from smkern.models import Step
from smkern.models.layers import DenseLayer, MoeLayer

OnLayer = Callable[[Any, int], Any]


def operator_calls(model: Model, loop: DecodeLoop) -> dict[str, Call]:
    """Name, as in `floor.kernels_of`, to call(i) on layer i modulo the layers.

    They run on the buffers as the loop's last step left them. What a step does once is here too,
    and "plan" and "embedding", which have no floor.

    Raises:
        ValueError: a quantized model, whose products read what norms and quantizing write.
    """
    if model.config.quantization is not None:
        raise ValueError(f"{model.plan.model}: the operators of bf16 models are timed alone")
    step = loop.step
    layers, count = model.decoder.weights.layers, model.config.num_layers

    def on(run: OnLayer) -> Call:
        return lambda i: run(layers[i % count], i % count)

    dense = isinstance(layers[0], DenseLayer)
    found = {name: on(run) for name, run in _attention(model, step).items()}
    mlp = _dense(model, step) if dense else _experts(model, step)
    found |= {name: on(run) for name, run in mlp.items()}
    return found | _once(model, loop)


def _attention(model: Model, step: Step) -> dict[str, OnLayer]:
    b, decoder, eps = step.buffers, model.decoder, model.config.rms_eps

    def append(layer: Any, index: int) -> Any:
        k_cache, v_cache = step.caches[index]
        return ops.qk_norm_rope_append(
            b.q, b.k, b.v, k_cache, v_cache, step.page_table, step.kv_lens,
            cos_sin=decoder.cos_sin, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps, out=b.q,
        )  # fmt: skip

    def attention(layer: Any, index: int) -> Any:
        k_cache, v_cache = step.caches[index]
        return ops.paged_attention(
            b.q, k_cache, v_cache, step.page_table, step.kv_lens, max_q_len=1, plan=step.plan,
            out=b.attended,
        )  # fmt: skip

    return {
        "input_norm": lambda layer, i: _norm(b.hidden, layer.input_norm, eps, b.normed),
        "qkv": lambda layer, i: _gemm(b.normed, layer.qkv, b.qkv, bias=layer.qkv_bias),
        "append": append,
        "attention": attention,
        "o": lambda layer, i: _gemm(b.attended_rows, layer.o, b.hidden, residual=b.hidden),
        "post_norm": lambda layer, i: _norm(b.hidden, layer.post_norm, eps, b.normed),
    }


def _norm(x: Any, weight: Any, eps: float, out: Any) -> Any:
    return ops.rms_norm(x, weight, eps=eps, out=out, num_sms=None)


def _gemm(a: Any, w: Any, out: Any, **options: Any) -> Any:
    return ops.gemm(a, w, out=out, static_weights=True, **options)


def _dense(model: Model, step: Step) -> dict[str, OnLayer]:
    b = step.buffers
    assert b.gated is not None
    gated = b.gated

    def gate_up(layer: DenseLayer, index: int) -> Any:
        return ops.gemm_swiglu(
            b.normed, layer.gate_up, out=gated, static_weights=True, num_sms=None
        )

    return {
        "gate_up": gate_up,
        "down": lambda layer, i: _gemm(gated, layer.down, b.hidden, residual=b.hidden),
    }


def _experts(model: Model, step: Step) -> dict[str, OnLayer]:
    b, moe, m = step.buffers, model.config.moe, step.buffers.moe
    assert moe is not None
    assert m is not None

    def route(layer: MoeLayer, index: int) -> Any:
        out = (m.weights, m.experts)
        return ops.topk_softmax(
            m.router_logits, moe.top_k, renormalize=moe.renormalize, out=out, num_sms=None
        )

    def permute(layer: MoeLayer, index: int) -> Any:
        out = (m.rows, m.offsets, m.index)
        return ops.moe_permute(b.normed, m.experts, moe.num_experts, out=out, num_sms=None)

    def gate_up(layer: MoeLayer, index: int) -> Any:
        return ops.grouped_gemm(
            m.rows, layer.w_gate_up, m.offsets, swiglu=True, out=m.gated, num_sms=None
        )

    def down(layer: MoeLayer, index: int) -> Any:
        return ops.grouped_gemm(m.gated, layer.w_down, m.offsets, out=m.outs, num_sms=None)

    def unpermute(layer: MoeLayer, index: int) -> Any:
        return ops.moe_unpermute(
            m.outs, m.index, m.weights, residual=b.hidden, out=b.hidden, num_sms=None
        )

    return {
        "router": lambda layer, i: _gemm(b.normed, layer.router, m.router_logits),
        "route": route,
        "permute": permute,
        "gate_up": gate_up,
        "down": down,
        "unpermute": unpermute,
    }


def _once(model: Model, loop: DecodeLoop) -> dict[str, Call]:
    """What a step has one launch of; the plan is refilled."""
    step = loop.step
    b, weights, eps = step.buffers, model.decoder.weights, model.config.rms_eps
    draw = draw_of(loop.graph.inputs)
    return {
        "plan": lambda i: step.planned(out=step.plan),
        "embedding": lambda i: model.decoder.embed(step),
        "final_norm": lambda i: _norm(b.hidden, weights.final_norm, eps, b.last_normed),
        "head": lambda i: _gemm(b.last_normed, weights.lm_head, b.logits),
        "sample": lambda i: draw(b.logits),
    }
