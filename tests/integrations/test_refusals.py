"""What attention cannot serve: sdpa where it can stand in, else an error with the remedy."""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch

import smkern.integrations
import smkern.integrations.transformers as st
from smkern.errors import ArgumentError
from tests.integrations.families import model_of, pair_of, prompts

pytestmark = pytest.mark.slow


@cache
def pair() -> tuple[Any, Any]:
    return pair_of("Llama")


def tril(length: int) -> torch.Tensor:
    """A causal 4-D mask of one's own, in which token 5 does not see token 2."""
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()
    mask[..., 5, 2] = False
    return mask


@torch.no_grad()
def test_a_mask_of_ones_own_goes_to_sdpa_with_a_warning() -> None:
    eager, ours = pair()
    ids = prompts(1, 9)
    additive = torch.zeros(1, 1, 9, 9).masked_fill(~tril(9), torch.finfo(torch.float32).min)
    wanted = eager(ids, attention_mask=additive).logits
    for mask in (tril(9), additive):
        with pytest.warns(RuntimeWarning, match=r"\[1, 1, 9, 9\].*sdpa serves it"):
            got = ours(ids, attention_mask=mask).logits
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_packed_sequences_go_to_sdpa() -> None:
    eager, ours = pair()
    ids, positions = prompts(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    wanted = eager(ids, position_ids=positions, use_cache=False).logits
    with pytest.warns(RuntimeWarning, match="sdpa serves it"):
        got = ours(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_without_fallback_and_with_sinks_or_softcap_a_mask_of_ones_own_raises() -> None:
    ids = prompts(1, 9)
    st.register(fallback=False)
    with pytest.raises(ArgumentError, match=r"2-D attention_mask, register\(fallback=True\)"):
        pair()[1](ids, attention_mask=tril(9))
    st.register()
    for family, name in (("GptOss", "sinks"), ("Gemma2", "softcap")):
        model = model_of(family, "smkern")
        masks = {"full_attention": tril(9), "sliding_attention": tril(9)}
        with pytest.raises(ArgumentError, match=f"with {name}.*attn_implementation='eager'"):
            model(ids, attention_mask=masks)


def test_training_and_gradients() -> None:
    model = model_of("Llama", "smkern")
    ids = prompts(1, 9)
    with pytest.raises(ArgumentError, match="has no backward: train with"):
        model(ids, labels=ids).loss.backward()
    model.train()
    with pytest.raises(ArgumentError, match=r"model.eval\(\) under torch.no_grad\(\)"):
        model(ids)
    with torch.no_grad():
        model(ids)


@torch.no_grad()
def test_dropout() -> None:
    model = model_of("Llama", "smkern", attention_dropout=0.1)
    model(prompts(1, 9))
    model.train()
    with pytest.raises(ArgumentError, match=r"dropout=0.1.*call model.eval\(\)"):
        model(prompts(1, 9))


@torch.no_grad()
def test_weights_of_attention() -> None:
    with pytest.raises(ArgumentError, match="attn_implementation='eager'"):
        pair()[1](prompts(1, 9), output_attentions=True)


@torch.no_grad()
def test_a_head_dim_without_a_kernel() -> None:
    model = model_of("Llama", "smkern", head_dim=32)
    with pytest.raises(ArgumentError, match=r"head_dim is 32 .*\[64, 96, 128, 256\].*'sdpa'"):
        model(prompts(1, 9))


@pytest.mark.parametrize(
    ("name", "remedy"), [("position_bias", "'sdpa'"), ("cache", r"'paged\|eager'")]
)
def test_what_other_layers_pass(name: str, remedy: str) -> None:
    from transformers import AttentionInterface

    x = torch.zeros(1, 2, 3, 64)
    with pytest.raises(ArgumentError, match=f"{name} is given.*{remedy}"):
        AttentionInterface()["smkern"](torch.nn.Identity(), x, x, x, None, **{name: object()})


def test_layers_that_make_no_mask() -> None:
    """As sdpa: causal from the first key on, one token sees all, and the caller may say other."""
    from transformers import AttentionInterface

    sdpa, ours = (AttentionInterface()[name] for name in ("sdpa", "smkern"))
    layer = torch.nn.Identity()
    for q_length, kv_length, causal in ((5, 5, True), (5, 8, True), (1, 8, True), (5, 8, False)):
        q, k = torch.randn(2, 4, q_length, 64), torch.randn(2, 4, kv_length, 64)
        got, wanted = (f(layer, q, k, k, None, is_causal=causal)[0] for f in (ours, sdpa))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_importing_registers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("smkern.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(smkern, "integrations", smkern.integrations)  # else it stays the new one
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        new = import_module("smkern.integrations.transformers")
    assert new is not st
    from transformers import AttentionInterface, AttentionMaskInterface

    tables = AttentionInterface(), AttentionMaskInterface()
    assert not any("mine" in table for table in tables)
    new.register("mine")
    assert all("mine" in table for table in tables)


def test_transformers_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'smkern\[transformers\]'"):
        st.register()
