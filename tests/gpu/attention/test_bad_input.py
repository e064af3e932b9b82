"""What attention on a GPU refuses, by name and with nothing written, and what it survives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import smkern
from smkern.errors import ArgumentError, BudgetError, PartitionError
from tests.gpu.attention.cases import GUARD, Case, Step, fresh_seed, int32, make_step
from tests.gpu.attention.support import BACKENDS, MIXED, attend, make_plan, run
from tests.gpu.attention.truth import check

PLAIN = Case(kv_lens=(40, 300, 17, 5))
RAGGED = Case(kv_lens=(40, 300, 17, 5), q_lens=(20, 1, 0, 4))
FP8 = Case(kv_lens=(40, 300, 17, 5), fp8=True)
FLAT = Case(kv_lens=(40, 300, 17, 5), flat=True)
OTHER = Case(kv_lens=(64, 100), q_lens=(30, 20))
COMPILED = [
    (case, backend)
    for case in (PLAIN, RAGGED, FP8, FLAT, MIXED, OTHER)
    for backend in (*BACKENDS, None)
]
INPUTS = ("q", "k_cache", "v_cache", "page_table", "kv_lens")


def refused(case: Case, error: type[Exception], message: str, **changes) -> None:
    """A call with these arguments raises and writes nothing; the next one is right."""
    step = make_step(case)
    given = {name: getattr(step, name) for name in INPUTS} | step.options()
    given |= {"out": step.out, "lse": step.lse, "return_lse": True}
    given |= {name: x(step) if callable(x) else x for name, x in changes.items()}
    inputs = [given.pop(name) for name in INPUTS]
    with pytest.raises(error, match=message):
        smkern.paged_attention(*inputs, **given)
    torch.cuda.synchronize()
    assert step.out_frame.isnan().all(), "something was written"
    assert step.lse_frame.isnan().all(), "something was written"
    attend(step)
    check(step)


@pytest.mark.parametrize("num_sms", [0, 10**6])
def test_budgets(num_sms):
    refused(PLAIN, BudgetError, rf"num_sms={num_sms}", num_sms=num_sms)
    with pytest.raises(BudgetError, match=rf"num_sms={num_sms}"):
        make_plan(make_step(PLAIN), num_sms=num_sms)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("float32", {"q": lambda s: s.q.float(), "out": None}),
        ("k_cache is on cpu", {"k_cache": lambda s: s.k_cache.cpu()}),
        ("out is on cpu", {"out": lambda s: s.out.cpu()}),
        ("sinks is on cpu", {"sinks": torch.zeros(8)}),
        ("out .*overlaps q", {"out": lambda s: s.q}),
        ("out .*overlaps k_cache", {"out": lambda s: s.k_cache.view(-1, 8, 128)[:4]}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_the_host_can_see(message, changes):
    """All else is refused by the same lines on CPU tensors: `tests/ops/attention`."""
    refused(PLAIN, ArgumentError, message, **changes)


def test_plans_of_another_step():
    step = make_step(PLAIN)
    refused(PLAIN, ArgumentError, "causal", plan=make_plan(step, causal=False))
    refused(PLAIN, ArgumentError, "plan for 16 SMs", plan=make_plan(step, num_sms=16))
    with smkern.ladder([16]) as ladder:
        decode = ladder.split(decode=16).decode
        plan = make_plan(step)
        with decode, pytest.raises(ArgumentError, match="16"):
            attend(step, plan=plan)
        with decode, pytest.raises(BudgetError, match="above the 16 SMs"):
            attend(step, num_sms=32)
    with pytest.raises(PartitionError), decode:
        attend(step)


def _spoilt(case: Case, name: str, at, value: int) -> Step:
    step = make_step(case)
    getattr(step, name)[at] = value
    return step


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ((PLAIN, "kv_lens", 2, 10**6), r"kv_lens\[2\] is 1000000"),
        ((PLAIN, "page_table", (1, 18), 10**6), r"request 1 has page 1000000 at its entry 18"),
        ((FLAT, "page_table", 0, 10**6), r"request 0 has page 1000000"),
        ((FLAT, "page_indptr", 2, 4), r"request 1 has 300 keys"),
        ((RAGGED, "cu_q_lens", 2, 3), r"cu_q_lens\[2\] is 3"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_check_names_the_row(step, message):
    step = _spoilt(*step)
    with pytest.raises(ArgumentError, match=message):
        attend(step, check=True)
    torch.cuda.synchronize()
    assert step.out.isnan().all(), "something was written"
    run(PLAIN, check=True)


def test_check_of_a_plan():
    for spoilt, message in (
        (_spoilt(PLAIN, "kv_lens", 2, 10**6), r"kv_lens\[2\]"),
        (_spoilt(RAGGED, "cu_q_lens", 2, 3), r"cu_q_lens\[2\]"),
    ):
        with pytest.raises(ArgumentError, match=message):
            make_plan(spoilt, check=True)
    make_plan(make_step(RAGGED), check=True)


@pytest.mark.parametrize("case", [PLAIN, RAGGED, FLAT, FP8], ids=["plain", "ragged", "flat", "fp8"])
def test_check_of_what_is_right(case):
    run(case, check=True)


def test_an_empty_batch():
    step = make_step(PLAIN)
    out = smkern.paged_attention(
        step.q[:0], step.k_cache, step.v_cache, step.page_table[:0], step.kv_lens[:0]
    )
    assert out.shape == (0, 8, 128)
    ragged, lse = smkern.paged_attention(
        step.q[:0], step.k_cache, step.v_cache, step.page_table[:0], step.kv_lens[:0],
        cu_q_lens=int32([0]), max_q_len=5, return_lse=True,
    )  # fmt: skip
    assert ragged.shape == (0, 8, 128)
    assert lse.shape == (0, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_of_nothing(backend):
    run(Case(kv_lens=(0, 0, 0)), backend=backend)
    run(Case(kv_lens=(0, 50, 0), q_lens=(0, 0, 0)), backend=backend)
    run(Case(kv_lens=(0, 50, 70), q_lens=(0, 20, 0)), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_beyond_the_table_read_what_it_has(backend):
    """Without check=True: clamped to the table, as if the request had ended there."""
    step = make_step(replace(PLAIN, kv_lens=(64, 64, 64, 64)))
    columns = step.case.pages[0]
    step.page_table = step.page_table[:, :columns]
    step.kv_lens[:] = int32([64, 65, 10**6, 2**31 - 1])
    attend(step, backend=backend)
    check(step)
    step.kv_lens[:] = int32([-1, -(2**31), 0, 0])
    attend(step, backend=backend)
    assert not step.out.any()


def _garbage(chance: random.Random, like: torch.Tensor) -> torch.Tensor:
    values = [
        chance.choice([chance.randrange(-(2**31), 2**31), chance.randrange(-3, 40)])
        for _ in range(like.numel())
    ]
    return int32(values).view(like.shape)


GARBAGE = {
    "table": (MIXED, ["page_table"]),
    "flat table": (replace(MIXED, flat=True), ["page_table"]),
    "indptr": (replace(MIXED, flat=True), ["page_indptr"]),
    "lengths": (MIXED, ["kv_lens"]),
    "flat lengths": (replace(MIXED, flat=True), ["kv_lens"]),
    "queries": (MIXED, ["cu_q_lens"]),
    "all": (MIXED, ["page_table", "kv_lens", "cu_q_lens"]),
    "flat all": (replace(MIXED, flat=True), ["page_table", "page_indptr", "kv_lens", "cu_q_lens"]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "names"), GARBAGE.values(), ids=GARBAGE)
def test_garbage_never_faults(case, names, backend):
    """Ids, offsets and lengths of any value: some result, no fault, and the next step is right."""
    chance = random.Random(fresh_seed())
    for _ in range(3):
        step = make_step(case)
        for name in names:
            held = getattr(step, name)
            held.copy_(_garbage(chance, held))
        attend(step, backend=backend)
        torch.cuda.synchronize()
        for frame, rows in ((step.out_frame, step.out), (step.lse_frame, step.lse)):
            outside = torch.cat([frame[:GUARD], frame[GUARD + len(rows) :]])
            assert outside.isnan().all(), "wrote outside of its outputs"
    run(case, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kv_lens", "cu_q_lens", "bounds"),
    [
        # more keys than max_total_kv: pieces are dropped, launch after launch
        ([5000, 5000, 5000, 5000], [0, 1, 2, 3, 4], {"max_total_kv": 6000}),
        # query ranges that overlap: more row blocks than the tokens have
        ([30_000, 20_000, 9000, 40_000], [0, 60, 0, 60, 0], {}),
    ],
    ids=["keys", "queries"],
)
def test_what_a_plan_has_no_room_for_stays_within_its_workspace(
    kv_lens, cu_q_lens, bounds, backend
):
    longest = max(kv_lens)
    case = Case(
        kv_lens=(longest,) * 4, q_lens=(15,) * 4, q_heads=4, kv_heads=1, head_dim=64,
        max_q_len=60, page_size=256,
    )  # fmt: skip
    step = make_step(case)
    step.kv_lens.copy_(int32(kv_lens))
    step.cu_q_lens.copy_(int32(cu_q_lens))
    plan = make_plan(step, **bounds)
    size = plan.workspace_bytes
    room = torch.full((size + (64 << 20),), 0x5A, dtype=torch.uint8, device="cuda")
    plan = replace(plan, workspace=room[:size])
    make_plan(step, out=plan, **bounds)
    for _ in range(3):  # layers
        attend(step, plan=plan, backend=backend)
    torch.cuda.synchronize()
    assert (room[size:] == 0x5A).all(), "wrote behind the plan's workspace"
    run(OTHER, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_whose_lengths_have_changed_since_never_faults(backend):
    """Planned for other lengths than the caches now have: nonsense, but within bounds."""
    step = make_step(MIXED)
    plan = make_plan(step)
    step.page_table.fill_(2**31 - 1)
    step.kv_lens.zero_()
    attend(step, plan=plan, backend=backend)
    torch.cuda.synchronize()
    run(MIXED, backend=backend)
