"""One plan a forward, made anew in place for the next."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smkern.integrations.transformers import attention as module
from smkern.integrations.transformers.attention import Attention
from tests.integrations.families import model_of, prompts

LAYER = torch.nn.Identity()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each plan made so far was a new one."""
    calls: list[bool] = []
    plan_attention = module.plan_attention

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options.get("out") is None)
        return plan_attention(*args, **options)

    monkeypatch.setattr(module, "plan_attention", counted)
    return calls


def test_layers_share_a_plan_and_steps_its_memory(made: list[bool]) -> None:
    """A prompt, then 11 tokens in two buckets of lengths: 250 to 256, 257 to 260."""
    model = model_of("Llama", "smkern")
    model.generate(prompts(2, 249), max_new_tokens=12, do_sample=False)
    assert made == [True, True, *[False] * 6, True, *[False] * 3]


def test_sliding_and_full_layers_have_a_plan_each(made: list[bool]) -> None:
    model = model_of("GptOss", "smkern", num_hidden_layers=4)
    with torch.no_grad():
        model(prompts(2, 20))
    assert made == [True, True]


def test_two_steps_of_equal_numbers_take_turns(made: list[bool]) -> None:
    attention = Attention()
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 1, 64), torch.randn(2, 1, 40, 64)
    paddings = [torch.arange(40).expand(2, -1) >= start for start in (0, 30)]
    alone, masks = (
        [attention.mask(2, 1, 40, 39, attention_mask=padding) for padding in paddings]
        for _ in range(2)
    )
    alone = [Attention().attend(LAYER, q, k, k, mask)[0] for mask in alone]
    made.clear()
    for _ in range(2):
        for mask, wanted in zip(masks, alone, strict=True):
            assert torch.equal(attention.attend(LAYER, q, k, k, mask)[0], wanted)
    assert made == [True, False, False, False]


def test_kept_plans_are_few() -> None:
    attention = Attention()
    for batch in range(1, 40):
        x = torch.zeros(batch, 1, 1, 64)
        attention.attend(LAYER, x, x, x, attention.mask(batch, 1, 1))
    assert len(attention._slots) == 16
