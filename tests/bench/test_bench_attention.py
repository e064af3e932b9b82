"""Cases, operands and the group runner of `smkern bench attention`, without a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from click.testing import CliRunner

from smkern.bench.attention import providers as attention_providers
from smkern.bench.attention.cases import (
    CASES,
    COLD,
    MIXED,
    ONE_PROMPT,
    SKEWED,
    SKEWED_LENGTHS,
    UNIFORM,
    UNIFORM_FP8,
    cases_named,
)
from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.attention.group import AttentionRunner, checked
from smkern.bench.attention.providers import Peers
from smkern.bench.attention.suite import command
from smkern.bench.contest import Contender
from smkern.bench.named import groups_of
from smkern.bench.results import Results, cell_key
from smkern.bench.sitting import pending
from smkern.device import Budget
from smkern.measure.attention import BUDGETS, AttentionCase, AttentionOperands
from smkern.measure.partitions import Place
from smkern.profile import load_profile
from smkern.tuning.attention.shapes import AttentionConfig

SMALL = AttentionCase(
    "small", "mixed", (1, 1, 21), (37, 5, 40), num_q_heads=4, num_kv_heads=2, head_dim=16
)
DENSE = AttentionCase(
    "dense", "prefill", (24, 24), (24, 24), num_q_heads=4, num_kv_heads=2, head_dim=16
)
NO_FLASHINFER = FlashInfer(None, None, "not installed", None)


def test_bytes_and_flops_of_decode():
    assert UNIFORM.bytes_moved == 2 * 262144 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert UNIFORM_FP8.bytes_moved == 2 * 262144 * 8 * 128 + 2 * 64 * 32 * 128 * 2
    assert UNIFORM.flops == 4 * 128 * 32 * 262144


@pytest.mark.parametrize("case", [SMALL, DENSE, MIXED], ids=lambda case: case.name)
def test_flops_count_the_visible_pairs(case):
    pairs = 0
    for q_len, kv_len in zip(case.q_lens, case.kv_lens, strict=True):
        pairs += sum(kv_len - q_len + t + 1 for t in range(q_len))
    assert case.flops == 4 * case.head_dim * case.num_q_heads * pairs


def test_lengths_are_the_same_each_time_and_drawn_from_the_list():
    assert SKEWED.batch == 32
    assert set(SKEWED.kv_lens) == set(SKEWED_LENGTHS)


def test_small_caches_rotate_past_the_l2():
    assert COLD.num_sets * COLD.bytes_moved > 2 * 60e6
    assert UNIFORM.num_sets == 1


def test_only_equal_prompts_with_nothing_cached_are_dense():
    assert [case.name for case in CASES if case.is_dense] == [
        "prefill-1x8192",
        "prefill-4x2048",
        "prefill-16x512",
    ]
    assert MIXED.num_decode == 64
    assert UNIFORM.num_decode == 64
    assert ONE_PROMPT.num_decode == 0


def test_cases_by_parts_of_their_names():
    assert [case.name for case in cases_named(["64x4096"])] == [UNIFORM.name, UNIFORM_FP8.name]
    with pytest.raises(ValueError, match=r"'no-such'.*decode-skewed"):
        cases_named(["64x4096", "no-such"])


def test_resume_leaves_out_what_was_measured():
    groups = groups_of((UNIFORM, COLD), (16, 132))
    results = Results()
    cell = {"op": "paged_attention", "case": UNIFORM.about, "num_sms": 16, "group_sms": 16}
    results.add(cell | {"provider": "smkern"})
    assert pending(groups, results) == groups[1:]
    assert len(groups_of(CASES, BUDGETS)) == len(CASES) * len(BUDGETS)


@pytest.fixture(scope="module")
def small() -> AttentionOperands:
    return AttentionOperands(SMALL, device="cpu")


def test_every_page_is_used_once_and_the_table_names_it(small):
    pages = small.pages
    assert sorted(pages.indices.tolist()) == list(range(pages.num_pages))
    for row, kv_len in enumerate(SMALL.kv_lens):
        begin, end = pages.indptr[row], pages.indptr[row + 1]
        count = int(end - begin)
        assert pages.table[row, :count].tolist() == pages.indices[begin:end].tolist()
        assert (count - 1) * SMALL.page_size + int(pages.last_page_len[row]) == kv_len
    assert pages.table.dtype == pages.indptr.dtype == pages.last_page_len.dtype == torch.int32


def test_both_layouts_hold_the_same_values(small):
    one = small.sets[0]
    for layout, pool in (("HND", one.k.transpose(1, 2)), ("NHD", one.k)):
        k, _ = small.pool(0, layout)
        assert k.is_contiguous()
        assert torch.equal(k, pool)


def test_the_reference_is_causal_attention(small):
    q, reference = small.sets[0].q, small.reference()
    k, v = (x.float() for x in small.gathered(0, 2))
    token, head = 7, 3
    visible = SMALL.kv_lens[2] - SMALL.q_lens[2] + token + 1
    scores = k[:visible, head // 2] @ q[2 + token, head].float() / math.sqrt(SMALL.head_dim)
    expected = scores.softmax(0) @ v[:visible, head // 2]
    torch.testing.assert_close(reference[2 + token, head], expected)
    small.poison()
    assert math.isnan(small.error(small.sets[0].out))
    assert small.error(reference) == 0.0


def test_dense_operands_give_the_paged_result():
    ops = AttentionOperands(DENSE, device="cpu")
    q, k, v = (x.float() for x in ops.dense(0))
    attention = torch.nn.functional.scaled_dot_product_attention
    out = attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert ops.error(out.reshape(ops.sets[0].q.shape)) < 1e-6


def test_an_fp8_cache_is_gathered_as_fp8():
    case = AttentionCase(
        "fp8", "decode", (1, 1), (20, 3), "fp8", num_q_heads=2, num_kv_heads=1, head_dim=16
    )
    ops = AttentionOperands(case, device="cpu")
    k, _ = ops.gathered(0, 0)
    assert (k.dtype, tuple(k.shape)) == (torch.float8_e4m3fn, (20, 1, 16))
    assert bool(ops.reference().isfinite().all())


def place(stream, num_sms=16, placement="spread") -> Place:
    return Place(num_sms, "green", placement, stream, Budget(num_sms, "mask"))


class FakePartitions:
    def __init__(self, cuda) -> None:
        self.places = {p: place(cuda.new_stream(), placement=p) for p in ("spread", "default")}

    def at(self, num_sms, placement="spread"):
        return self.places[placement]


def contender(ops, cuda, provider, at, us, *, value=None, **about) -> Contender:
    def call(i):
        cuda.work_us(us)
        return ops.reference() if value is None else ops.sets[0].out.fill_(value)

    return Contender(provider, at, lambda: call, about)


class NoMeter:
    last = (None, None)

    def __call__(self) -> None:
        return None


@pytest.fixture
def runner(cuda) -> AttentionRunner:
    return AttentionRunner(FakePartitions(cuda), load_profile("h200"), NoMeter(), budget_us=2000.0)


def measured(runner, small, cuda, monkeypatch, peers, ours_us=50.0):
    import smkern.bench.attention.group as module

    at = runner.partitions.places
    ours = [contender(small, cuda, "smkern", at["spread"], ours_us, layout="HND")]
    monkeypatch.setattr(module, "our_contenders", lambda ops, where: ours)
    monkeypatch.setattr(module, "plan_of", lambda ops, where, out=None: cuda.work_us(4.0))

    class Fixed:
        def at(self, where):
            return [c for c in peers if c.place is where]

    (group,) = groups_of((SMALL,), (16,))
    return runner.measure(group, small, Fixed())


def test_the_best_layout_and_place_of_a_peer_count(runner, small, cuda, monkeypatch):
    at = runner.partitions.places
    peers = [
        contender(small, cuda, "flashinfer:fa2", at["spread"], 90.0, layout="HND"),
        contender(small, cuda, "flashinfer:fa2", at["spread"], 80.0, layout="NHD"),
        contender(small, cuda, "flashinfer:fa2", at["default"], 70.0, layout="HND"),
        contender(small, cuda, "sdpa:cudnn", at["spread"], 40.0),
    ]
    cells = measured(runner, small, cuda, monkeypatch, peers)
    by = {(c["op"], c["provider"], c["placement"]): c for c in cells}
    assert len(by) == len(cells) == 5
    assert by["paged_attention", "flashinfer:fa2", "spread"]["layout"] == "NHD"
    ours = by["paged_attention", "smkern", "spread"]
    assert ours["us"] == pytest.approx(50.0, rel=1e-3)
    assert ours["vs"] == pytest.approx({"flashinfer:fa2": 1.4, "sdpa:cudnn": 0.8}, rel=1e-3)
    assert ours["vs_flashinfer"] == pytest.approx(1.4, rel=1e-3)
    assert (ours["best_flashinfer"], ours["best_peer"]) == ("flashinfer:fa2", "sdpa:cudnn")
    assert "vs_flashinfer_again" not in ours
    assert by["plan_attention", "smkern", "spread"]["us"] == pytest.approx(4.0, rel=0.05)
    assert len({cell_key(cell) for cell in cells}) == len(cells)
    assert all(cell["group_sms"] == 16 for cell in cells)


def test_a_group_that_loses_is_measured_again(runner, small, cuda, monkeypatch):
    at = runner.partitions.places
    peers = [contender(small, cuda, "flashinfer:fa3", at["default"], 40.0)]
    cells = measured(runner, small, cuda, monkeypatch, peers)
    ours = next(c for c in cells if c["provider"] == "smkern" and c["op"] == "paged_attention")
    assert ours["vs_flashinfer"] == pytest.approx(0.8, rel=1e-2)
    assert ours["vs_flashinfer_again"] == pytest.approx(0.8, rel=1e-2)
    assert ours["us_again"] == pytest.approx(50.0, rel=1e-3)


def test_a_provider_that_is_wrong_or_raises_has_an_error(runner, small, cuda, monkeypatch):
    at = runner.partitions.places

    def refuse():
        raise RuntimeError("no kernel\nmore")

    peers = [
        contender(small, cuda, "flashinfer:fa2", at["spread"], 9.0, value=0.0),
        contender(small, cuda, "flashinfer:fa3", at["spread"], 9.0, value=float("nan")),
        Contender("sdpa:cudnn", at["spread"], refuse, {}),
    ]
    cells = measured(runner, small, cuda, monkeypatch, peers)
    errors = {c["provider"]: c["error"] for c in cells if c.get("error")}
    assert set(errors) == {"flashinfer:fa2", "flashinfer:fa3", "sdpa:cudnn"}
    assert errors["flashinfer:fa2"].startswith("wrong result: |out - torch| / |torch| is 1")
    assert "nan" in errors["flashinfer:fa3"]
    assert errors["sdpa:cudnn"] == "RuntimeError: no kernel"
    ours = next(c for c in cells if c["provider"] == "smkern" and c["op"] == "paged_attention")
    assert "vs" not in ours


def test_checked_returns_the_call(small, cuda):
    errors: dict[str, str] = {}
    good = contender(small, cuda, "smkern", place(cuda.new_stream()), 1.0)
    call = checked(good, small, errors)
    assert call is not None
    assert errors == {}


def test_our_call_passes_the_plan_and_the_backend(small, cuda, monkeypatch):
    import smkern

    seen = []

    def attention(q, k, v, table, kv_lens, **options):
        seen.append(options)
        assert k.shape[1:] == (SMALL.page_size, SMALL.num_kv_heads, SMALL.head_dim)

    plans = []
    monkeypatch.setattr(smkern, "paged_attention", attention, raising=False)
    monkeypatch.setattr(
        smkern, "plan_attention", lambda *a, **o: plans.append(o) or "plan", raising=False
    )
    at = place(cuda.new_stream())
    for one in attention_providers.our_contenders(small, at):
        one.make()(0)
    assert [options["backend"] for options in seen] == [None, "cuda", "triton"]
    assert all(options["plan"] == "plan" and options["max_q_len"] == 21 for options in seen)
    assert len(plans) == 1
    assert (plans[0]["max_kv_len"], plans[0]["num_tokens"]) == (40, 23)


def test_the_public_operator_is_right_on_cpu_tensors(cuda):
    case = AttentionCase(
        "cpu", "mixed", (1, 1, 21), (37, 5, 40), num_q_heads=4, num_kv_heads=2, head_dim=64
    )
    ops = AttentionOperands(case, device="cpu")
    ours = next(attention_providers.our_contenders(ops, place(cuda.new_stream())))
    ops.poison()
    assert ops.error(ours.make()(0)) < 1e-2


def test_a_configuration_in_one_word():
    assert attention_providers.describe(AttentionConfig("triton")) == "triton"
    config = AttentionConfig("cuda", ctas_per_sm=3, teams=2)
    assert attention_providers.describe(config) == "cuda:ctas_per_sm=3:teams=2"


def test_peers_without_flashinfer_are_those_of_torch():
    ops = AttentionOperands(DENSE, device="cpu")
    assert [c.provider for c in Peers(ops, NO_FLASHINFER).at(place(None))] == [
        "sdpa:cudnn",
        "sdpa:flash",
    ]


def test_without_a_gpu_the_command_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = CliRunner().invoke(command, ["--quick"])
    assert ran.exit_code == 1
    assert "GPU" in ran.output


def test_a_wrong_case_name_is_an_error(monkeypatch):
    import smkern.bench.frame as module

    monkeypatch.setattr(module, "device_info", lambda: load_profile("h200").info)
    ran = CliRunner().invoke(command, ["--cases", "no-such"])
    assert ran.exit_code == 1
    assert "no case is named 'no-such'" in ran.output
