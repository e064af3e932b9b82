"""What the append operators refuse: each error names the argument, its value and the remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import smkern.ops as smkern
from smkern.errors import ArgumentError, BudgetError
from tests.ops.append_cases import ALL, DECODE, FP8, NAMES, make


def call(case=ALL, check=False, **changes):
    """The operator on a case with some arguments replaced, by value or by a function of them."""
    args, options = make(case)
    given = dict(zip(NAMES, args, strict=True)) | options
    for name, value in changes.items():
        given[name] = value(given) if callable(value) else value
    rows = [given.pop(name) for name in NAMES]
    return smkern.qk_norm_rope_append(*rows, **given, check=check)


def wide(name):
    """Every second element of a tensor twice as wide: an inner stride of 2."""
    return lambda given: torch.cat([given[name]] * 2, -1)[..., ::2]


REFUSED = {
    "q-none": ({"q": None}, "q is None.*append_kv"),
    "k-none": ({"k": None}, "k is None"),
    "k-number": ({"k": 3}, "k is int, not a torch.Tensor"),
    "q-2d": ({"q": lambda x: x["q"].flatten(1)}, r"q has shape.*wanted \[tokens, q_heads"),
    "k-stride": ({"k": wide("k")}, "k has strides.*contiguous"),
    "q-dtype": ({"q": lambda x: x["q"].float()}, "q is torch.float32, k is torch.float16"),
    "k-dtype": ({"k": lambda x: x["k"].int()}, "k is torch.int32: use torch.bfloat16"),
    "v-shape": ({"v": lambda x: x["v"][:, :1]}, r"v has shape \[13, 1, 64\], k \[13, 2, 64\]"),
    "tokens": ({"q": lambda x: x["q"][:-1]}, r"q has shape \[12, 4, 64\].*tokens"),
    "groups": ({"q": lambda x: x["q"][:, :3]}, "3 query heads over 2 KV heads"),
    "cache-dtype": ({"k_cache": lambda x: x["k_cache"].float()}, "k_cache is torch.float32, k is"),
    "cache-pair": ({"v_cache": lambda x: x["v_cache"][1:]}, "both must be of one shape"),
    "cache-heads": (
        {"k_cache": lambda x: x["k_cache"][:, :, :1], "v_cache": lambda x: x["v_cache"][:, :, :1]},
        "k has 2 heads of 64, the caches 1 of 64",
    ),
    "cache-shared": (
        {"k_cache": lambda x: x["k_cache"][:, :, :1].expand(-1, -1, 2, -1)},
        "k_cache has strides.*share an address",
    ),
    "page-size": (
        {"k_cache": lambda x: x["k_cache"][:, :15], "v_cache": lambda x: x["v_cache"][:, :15]},
        "page_size=15",
    ),
    "table-dtype": ({"page_table": lambda x: x["page_table"].long()}, "page_table is torch.int64"),
    "table-rows": ({"page_table": lambda x: x["page_table"][1:]}, "page_table has 3 rows"),
    "table-flat": ({"page_table": lambda x: x["page_table"][0]}, "without page_indptr"),
    "table-device": ({"page_table": lambda x: x["page_table"].to("meta")}, "page_table is on meta"),
    "k-device": ({"k": lambda x: x["k"].to("meta")}, "k is on meta"),
    "cos-device": ({"cos_sin": lambda x: x["cos_sin"].to("meta")}, "cos_sin is on meta"),
    "lens-dtype": ({"kv_lens": lambda x: x["kv_lens"].long()}, "kv_lens is torch.int64"),
    "cu-size": ({"cu_q_lens": lambda x: x["cu_q_lens"][1:]}, r"cu_q_lens.*wanted \[5\]"),
    "cu-none": ({"cu_q_lens": None}, "k has 13 tokens for 4 requests.*pass cu_q_lens"),
    "one-norm": ({"k_norm": None}, "q_norm is given without k_norm"),
    "other-norm": ({"q_norm": None}, "k_norm is given without q_norm"),
    "norm-size": ({"q_norm": lambda x: x["q_norm"][:32]}, r"q_norm.*wanted \[64\]"),
    "norm-dtype": (
        {"q_norm": lambda x: x["q_norm"].bfloat16(), "k_norm": lambda x: x["k_norm"].bfloat16()},
        "q_norm is torch.bfloat16.*k's dtype or torch.float32",
    ),
    "eps": ({"eps": -1.0}, "eps=-1.0"),
    "eps-text": ({"eps": "small"}, "eps='small'"),
    "table-odd": ({"cos_sin": lambda x: x["cos_sin"][:, :63]}, r"cos_sin has shape \[64, 63\]"),
    "table-wide": ({"cos_sin": lambda x: torch.ones(4, 128)}, "2 to head_dim 64"),
    "table-empty": ({"cos_sin": lambda x: x["cos_sin"][:0]}, r"\[0, 64\].*at least one position"),
    "cos-dtype": ({"cos_sin": lambda x: x["cos_sin"].double()}, "cos_sin is torch.float64"),
    "positions-alone": (
        {"cos_sin": None, "positions": torch.arange(13)},
        "positions are given without cos_sin",
    ),
    "positions-dtype": ({"positions": torch.ones(13)}, "positions is torch.float32"),
    "positions-size": ({"positions": torch.arange(12)}, r"positions.*wanted \[13\]"),
    "scale": ({"k_scale": 1.0}, "k_scale is given and the cache is torch.float16"),
    "out-shape": ({"out": lambda x: x["q"][:, :2].clone()}, r"out is \[13, 2, 64\]"),
    "out-dtype": ({"out": lambda x: x["q"].float()}, "out is .* torch.float32"),
    "out-is-k": ({"out": lambda x: x["k"], "q": lambda x: x["q"][:, :2]}, "out at .* overlaps k"),
    "caches": ({"v_cache": lambda x: x["k_cache"]}, "k_cache at .* overlaps v_cache"),
    "k-in-cache": (
        {"k_cache": lambda x: x["k_cache"], "v": lambda x: x["k_cache"].flatten(0, 1)[:13]},
        "k_cache at .* overlaps v",
    ),
}


@pytest.mark.parametrize(("changes", "match"), REFUSED.values(), ids=REFUSED)
def test_refused(changes, match):
    with pytest.raises(ArgumentError, match=match):
        call(**changes)


def test_q_shifted_within_itself_is_an_overlap():
    args, options = make(ALL)
    buffer = torch.zeros(14, 4, 64).half()
    with pytest.raises(ArgumentError, match="only be out itself"):
        smkern.qk_norm_rope_append(buffer[:13], *args[1:], **options, out=buffer[1:])


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_caches_may_be_halves_of_one_buffer(dim):
    """By page, slot, head or dimension; and a buffer is no pair when shifted by less."""
    args, options = make(ALL)
    pages, size, heads, width = args[3].shape
    shape = [pages, size, heads, width]
    if dim == 4:
        shape[3] = 2 * width
        both = torch.zeros(shape).half()
        k_cache, v_cache = both[..., :width], both[..., width:]
    else:
        shape.insert(dim, 2)
        both = torch.zeros(shape).half()
        k_cache, v_cache = both.unbind(dim)
    smkern.qk_norm_rope_append(*args[:3], k_cache, v_cache, *args[5:], **options)
    rows = [int((x != 0).any(-1).sum()) for x in (k_cache, v_cache)]
    assert rows == [26, 26]
    if dim == 4:
        with pytest.raises(ArgumentError, match=r"k_cache at .* overlaps v_cache"):
            smkern.append_kv(
                *args[1:3], k_cache, both[..., 32 : 32 + width], *args[5:],
                cu_q_lens=options["cu_q_lens"],
            )  # fmt: skip


@pytest.mark.parametrize(
    ("scale", "match"),
    [
        (0.0, "k_scale=0.0: pass a finite number above 0"),
        (-1.0, "k_scale=-1.0"),
        (float("inf"), "k_scale=inf"),
        (torch.ones(2), r"k_scale has shape \[2\]"),
        (torch.ones(1).double(), "k_scale .*torch.float64"),
    ],
)
def test_bad_scales(scale, match):
    with pytest.raises(ArgumentError, match=match):
        call(replace(ALL, cache_dtype=FP8), k_scale=scale)


@pytest.mark.parametrize("num_sms", [0, -1, True, 1.5])
def test_bad_budgets(num_sms):
    with pytest.raises(BudgetError, match="num_sms="):
        call(num_sms=num_sms)


def put(name, at, value):
    """A copy of a tensor with one element replaced."""

    def change(given):
        x = given[name].clone()
        x[at] = value
        return x

    return change


CHECKED = {
    "decrease": ({"cu_q_lens": put("cu_q_lens", 2, 0)}, r"cu_q_lens\[2\] is 0, below.*\[1\] 1"),
    "tokens": ({"cu_q_lens": put("cu_q_lens", 4, 14)}, r"cu_q_lens\[4\] is 14, outside the 13"),
    "short": ({"kv_lens": put("kv_lens", 1, 2)}, r"kv_lens\[1\] is 2 and request 1 has 3 new"),
    "negative": ({"kv_lens": put("kv_lens", 0, -4)}, r"kv_lens\[0\] is -4"),
    "long": ({"kv_lens": put("kv_lens", 1, 80)}, "token 1 is at position 77 of request 1, entry 4"),
    "page": (
        {"page_table": put("page_table", (1, 2), 99)}, "token 1 is at position 37 of request 1",
    ),
    "shared": (
        {"page_table": lambda x: x["page_table"].index_put(
            (torch.tensor([3]), torch.tensor([0])), x["page_table"][1, 2])},
        r"tokens 1 and 9 \(of requests 1 and 3\) both go to slot 5",
    ),
    "rope": ({"cos_sin": lambda x: x["cos_sin"][:39]}, "token 3 .*position 39.*rows 0 to 38"),
    "positions": (
        {"positions": lambda x: torch.arange(13).index_fill(0, torch.tensor(5), 64)},
        "token 5 .*at position 64",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "match"), CHECKED.values(), ids=CHECKED)
def test_check_reads_memory_and_names_the_row(changes, match):
    call(**changes)
    with pytest.raises(ArgumentError, match=match):
        call(**changes, check=True)


def test_check_of_a_scale_on_the_device():
    case = replace(ALL, cache_dtype=FP8)
    with pytest.raises(ArgumentError, match=r"v_scale=0.0: pass a finite number above 0"):
        call(case, v_scale=torch.zeros(1), check=True)


def test_check_lets_idle_slots_of_a_decode_batch_pass():
    call(replace(DECODE, requests=((1, 37), (1, 0), (1, 16))), check=True)
