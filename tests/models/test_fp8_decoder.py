"""Decoders in fp8 on CPU tensors, against transformers' models whose linear layers round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smkern import ops
from smkern.models import Decoder, ModelConfig, Weights, quantize
from tests.models.fp8_checkpoints import CONFIGS, FP8, SIZES, config_of, is_linear, sizes_of, write
from tests.models.peers import make_peer, prompts
from tests.models.session import Session

pytestmark = pytest.mark.slow

COUNTS = (37, 12, 80)
"""Tokens of the requests' prompts."""
FEW = (5, 2, 9)
"""So few that hardly a value of a layer lies between two of e4m3 to within fp32's rounding."""
TIGHT = {"rtol": 1e-3, "atol": 1e-3}
DENSE = ("llama", "qwen2", "qwen3")
KINDS = ("fp8-block", "fp8-channel", "fp8-tensor")


def rounded(x: Tensor, how: str, scale: Tensor | None = None) -> Tensor:
    """Inputs as fp8 gives them back: 128 columns of a row, or a row, share a scale."""
    groups = x.unflatten(-1, (-1, 128)) if how == "block" else x[..., None, :]
    if scale is None:
        scale = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups * (1 / scale)).clamp(-448, 448).to(FP8).float() * scale).view_as(x)


class Rounding(nn.Module):
    """A linear layer that rounds its inputs as a product in fp8 does, and is exact otherwise."""

    def __init__(self, linear: nn.Linear, round_inputs: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.round_inputs = round_inputs

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.round_inputs(x), self.weight, self.bias)


def widened(weights: Weights) -> dict[str, Tensor]:
    """What quantized weights stand for, in fp32, by their names."""
    named, found = weights.named(), {}
    for name, tensor in named.items():
        if not is_linear(name):
            if name.endswith((".weight", ".bias", "norm")):
                found[name] = tensor
            continue
        base = name.removesuffix(".weight")
        scale = named.get(f"{base}.weight_scale_inv")
        if scale is None:
            wide = named[f"{base}.weight_scale"]
        else:
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        found[name] = tensor.float() * wide
    return found


def hub_model(weights: Weights, family: str, *, rounding: bool) -> nn.Module:
    """transformers' eager fp32 model with the weights that ours stand for."""
    layers = weights.config.num_layers
    model = make_peer(family, **SIZES, num_hidden_layers=layers).model
    model.load_state_dict(widened(weights))
    kind = weights.config.quantization
    if not rounding or kind is None:
        return model
    named, how = weights.named(), kind.kind.removeprefix("fp8-")
    for name, module in list(model.named_modules()):
        if not is_linear(f"{name}.weight"):
            continue
        scale = named.get(f"{name}.input_scale")

        def round_inputs(x: Tensor, scale: Tensor | None = scale) -> Tensor:
            return rounded(x, "tensor" if scale is not None else how, scale)

        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], Rounding(module, round_inputs))
    return model


def last_logits(model: nn.Module, texts: list[list[int]]) -> Tensor:
    with torch.no_grad():
        found = [model(torch.tensor([text]), logits_to_keep=1).logits[0, 0] for text in texts]
    return torch.stack(found)


def assert_rounded_alike(got: Tensor, want: Tensor) -> None:
    """Rows are equal, but for those in which a value fell to the other side of two of e4m3, which
    moves what follows by a percent or two; rounding inputs another way, or not at all, moves every
    row by four or more. Tokens are the same where more than that decides."""
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    assert errors.min() < 1e-3
    assert errors.median() < 0.03
    best, second = want.topk(2).values.unbind(1)
    clear = best - second > 2 * (got - want).abs().amax(1)
    assert clear.any()
    assert torch.equal(got.argmax(1)[clear], want.argmax(1)[clear])


def random_weights(family: str, kind: str, **changes: int) -> Weights:
    torch.manual_seed(11)
    peer = make_peer(family, **(sizes_of(family) | changes))
    config = ModelConfig.from_hf(peer.model.config).replace(dtype=torch.float32)
    return quantize(Weights.from_tensors(config, peer.model.state_dict()), kind)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_and_greedy_tokens(family: str, kind: str):
    weights = random_weights(family, kind, num_hidden_layers=1)
    model, texts = hub_model(weights, family, rounding=True), prompts(FEW)
    session = Session.make(Decoder(weights.config, weights), len(texts))
    got = session.logits(texts)
    for _ in range(4):
        want = last_logits(model, texts)
        assert_rounded_alike(got, want)
        tokens = want.argmax(-1).tolist()
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        got = session.logits([[token] for token in tokens], ragged=False)


@pytest.mark.parametrize("kind", CONFIGS)
def test_checkpoints_give_their_logits(tmp_path: Path, kind: str):
    write(tmp_path, kind)
    weights = Weights.load(tmp_path, config=ModelConfig.from_hf(tmp_path).replace(num_layers=1))
    texts = prompts(FEW)
    got = Session.make(Decoder(weights.config, weights), len(texts)).logits(texts)
    model = hub_model(weights, "qwen3", rounding=True)
    assert_rounded_alike(got, last_logits(model, texts))


def exact(weights: Weights) -> Weights:
    """What quantized weights stand for, as weights in fp32."""
    config = weights.config.replace(quantization=None)
    return Weights.from_tensors(config, widened(weights))


def distance(got: Tensor, want: Tensor) -> float:
    """The median row's error, of its length: where experts are as good as equal rounding decides,
    and such rows are far off."""
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).median())


@pytest.mark.parametrize("family", [*DENSE, "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_rounding_errs_as_transformers_does(family: str, kind: str):
    """Against the weights that fp8 stands for, in fp32: e4m3 keeps 4 bits of an input, 8 times."""
    weights = random_weights(family, kind)
    texts = prompts(range(2, 60, 6))
    got, want = (
        Session.make(Decoder(x.config, x), len(texts)).logits(texts)
        for x in (weights, exact(weights))
    )
    if family == "qwen3_moe":
        assert 0.02 < distance(got, want) < 0.15
        return
    theirs = last_logits(hub_model(weights, family, rounding=True), texts)
    plain = last_logits(hub_model(weights, family, rounding=False), texts)
    torch.testing.assert_close(plain, want, **TIGHT)
    assert 0.02 < distance(got, want) <= 1.15 * distance(theirs, want)


@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 128), (4, 4, 64)])
def test_attention_writes_blocks_itself(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, ...]):
    """Logits are those of a pass of its own, which is left where two KV heads share a scale."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = dict(zip(names, heads, strict=True)) | {"num_hidden_layers": 1}
    weights = random_weights("qwen3", "fp8-block", **sizes)
    texts, passes = prompts(COUNTS), []
    quantize_rows = ops.quantize

    def spied(*args: Any, **options: Any) -> Any:
        passes.append(args[1])
        return quantize_rows(*args, **options)

    monkeypatch.setattr(ops, "quantize", spied)
    got = Session.make(Decoder(weights.config, weights), len(texts)).logits(texts)
    fused = heads != (4, 4, 64)
    assert weights.config.attends_in_e4m3 == fused
    assert passes == ([] if fused else ["block"])
    monkeypatch.setattr(ModelConfig, "attends_in_e4m3", False)
    wanted = Session.make(Decoder(weights.config, weights), len(texts)).logits(texts)
    assert len(passes) == (1 if fused else 2)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_depend_on_the_request_alone(kind: str):
    """Scales are a token's own: neither the batch nor chunks change them."""
    weights = random_weights("qwen3", kind)
    decoder, texts = Decoder(weights.config, weights, batch_invariant=True), prompts(COUNTS)
    together = Session.make(decoder, len(texts)).logits(texts)
    session = Session.make(decoder, len(texts))
    session.logits([text[: len(text) - 9] if len(text) > 12 else [] for text in texts])
    rest = [text[len(text) - 9 :] if len(text) > 12 else text for text in texts]
    assert torch.equal(session.logits(rest), together)
    for index, text in enumerate(texts):
        assert torch.equal(Session.make(decoder, 1).logits([text])[0], together[index])


class TestCacheScales:
    """fp8 caches whose values are far outside of e4m3 unless they are scaled."""

    SCALES = torch.tensor([[64.0, 0.001], [0.25, 512.0]])

    @pytest.fixture
    def plain(self) -> Weights:
        config = config_of("llama")
        weights = Weights.random(config.replace(initializer_range=0.08), 2)
        kv, at = config.kv_size, config.q_size
        for layer, (k, v) in zip(weights.layers, self.SCALES, strict=True):
            layer.qkv[at : at + kv].mul_(k * 10)
            layer.qkv[:at].div_(k * 10)
            layer.qkv[at + kv :].mul_(v * 10)
            layer.o.div_(v * 10)
        return weights

    def _logits(self, weights: Weights, dtype: torch.dtype = torch.float32) -> Tensor:
        texts = prompts(COUNTS)
        decoder = Decoder(weights.config, weights)
        session = Session.make(decoder, len(texts), cache_dtype=dtype)
        session.logits([text[:-1] for text in texts])
        return session.logits([text[-1:] for text in texts], ragged=False)

    def test_scales_of_each_layer_are_read(self, plain: Weights):
        want = self._logits(plain)
        scaled = self._logits(replace(plain, kv_scales=self.SCALES), FP8)
        assert (scaled - want).norm() < 0.1 * want.norm()
        unscaled = self._logits(plain, FP8)
        swapped = self._logits(replace(plain, kv_scales=self.SCALES.flip(0)), FP8)
        assert (unscaled - want).norm() > 0.3 * want.norm()
        assert (swapped - want).norm() > 0.3 * want.norm()

    def test_other_caches_have_none(self, plain: Weights):
        assert torch.equal(self._logits(replace(plain, kv_scales=self.SCALES)), self._logits(plain))


def test_transformers_reads_the_same_checkpoint(tmp_path: Path):
    """Its op widens blocks to what our scales say. Loading needs accelerate, which is not here."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors = write(tmp_path, "blocks")
    ours = widened(Weights.load(tmp_path))
    widen = Fp8Dequantize(None)
    for name in filter(is_linear, tensors):
        scale = tensors[name.replace(".weight", ".weight_scale_inv")]
        theirs = widen._dequantize_one(tensors[name], scale, output_dtype=torch.float32)
        assert torch.equal(ours[name], theirs), name
