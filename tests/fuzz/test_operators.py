"""Every public operator: right in fp64 where it is served, smkern's own errors where it is not."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import smkern
from smkern.errors import SmkernError
from tests.fuzz import fp8, operators, paged
from tests.fuzz.conftest import Cases
from tests.fuzz.hostile import changed

SIMPLE = ("gemm", "gemm_swiglu", "grouped_gemm", "merge_states", "rms_norm", "add_rms_norm",
          "silu_and_mul", "embedding", "topk_softmax", "moe_permute", "moe_unpermute",
          "sample")  # fmt: skip
PAGED = ("paged_attention", "append_kv", "qk_norm_rope_append", "plan_attention")
MAKERS = {name: getattr(operators, name) for name in SIMPLE}
MAKERS |= {name: getattr(paged, name) for name in PAGED}
MAKERS["quantize"] = fp8.quantize
SCALED = {
    "gemm": fp8.scaled_gemm, "gemm_swiglu": fp8.scaled_swiglu, "grouped_gemm": fp8.scaled_grouped,
    "rms_norm": fp8.scaled_norm, "silu_and_mul": fp8.scaled_silu,
}  # fmt: skip
"""Other calls of the same operators."""

every_operator = pytest.mark.parametrize("name", MAKERS)


class Watching(TorchDispatchMode):
    """A mode that changes nothing: calls go by torch's dispatcher."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def somewhere(random: Random) -> Any:
    """Where a call is made: past torch's dispatcher, or by it."""
    return random.choice(
        (nullcontext, nullcontext, Watching, torch.no_grad, torch.inference_mode)
    )()


def tensors_of(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [y for part in x for y in tensors_of(part)] if isinstance(x, list | tuple) else []


def check(found: Tensor, truth: Tensor) -> None:
    """Within four roundings of fp64."""
    exact, numbers = found.dtype, found.detach().double()
    assert numbers.shape == truth.shape
    kind = torch.finfo(exact if exact.is_floating_point else torch.float64)
    largest = truth[truth.isfinite()].abs().max().item() if truth.isfinite().any() else 0.0
    slack = 4 * kind.eps * (truth.abs() + kind.smallest_normal) + 1e-5 * (1 + largest)
    assert bool(((numbers - truth).abs() <= slack).logical_or(numbers == truth).all())


def test_no_operator_is_forgotten() -> None:
    takes = {
        name
        for name in smkern.__dir__()
        if not name.startswith(("_", "explain"))
        and inspect.isfunction(found := getattr(smkern, name))
        and {"num_sms", "out"} & set(inspect.signature(found).parameters)
        and found.__module__.startswith("smkern.ops.")
        and not name.endswith("_bytes")
    }
    assert takes == set(MAKERS)


@every_operator
def test_values_are_those_of_fp64(name: str, cases: Cases) -> None:
    for random in cases(60):
        made = random.choice((MAKERS[name], SCALED.get(name, MAKERS[name])))(random)
        with somewhere(random):
            found = getattr(smkern, name)(**made.arguments)
        if made.truth is None:
            continue
        results = tensors_of(found) + [made.arguments[x] for x in made.changed]
        for one, truth in zip(results, made.truth, strict=True):
            check(one, truth)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch has some of tensors so odd
@every_operator
def test_what_does_not_belong_is_refused_by_name(name: str, cases: Cases) -> None:
    parameters = [*inspect.signature(getattr(smkern, name)).parameters]
    for random in cases(300):
        made = random.choice((MAKERS[name], SCALED.get(name, MAKERS[name])))(random)
        arguments = made.arguments
        for _ in range(random.choice((1, 1, 2))):
            where = random.choice((*arguments, random.choice(parameters)))
            arguments[where] = changed(random, arguments.get(where))
        written = [
            x for key in (*made.changed, "out", "lse") for x in tensors_of(arguments.get(key))
        ]
        plain = [x for x in written if x.layout is torch.strided and not (x.is_nested or x.is_meta)]
        before = [x.detach().clone() for x in plain]
        try:
            with somewhere(random):
                getattr(smkern, name)(**arguments)
        except SmkernError:
            assert all(same(x, y) for x, y in zip(plain, before, strict=True)), "it was written"


def same(x: Tensor, y: Tensor) -> bool:
    """Equal, NaN too."""
    return torch.equal(*(z.detach().to(torch.complex128).nan_to_num(1e300) for z in (x, y)))
