"""Bits that do not move: a request alone, in any batch, place or budget, beside any neighbour."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.attention.cases import Case, Step, int32, make_step
from tests.gpu.attention.support import BACKENDS, MIXED, attend
from tests.gpu.attention.truth import check
from tests.gpu.bits import same_bits
from tests.gpu.sides import at_most, neighbours

LONG = Case(kv_lens=(5000, 1, 700, 0, 256, 2100), q_heads=8, kv_heads=2)
VERIFY = Case(kv_lens=(5000, 9, 700, 8, 256, 1300), q_lens=(8, 1, 3, 8, 5, 2))
PREFILL = Case(kv_lens=(300, 64, 2000, 9), q_lens=(300, 64, 40, 9))
CUT = Case(kv_lens=(17_000, 300, 9000), q_lens=(20, 1, 150), head_dim=64, q_heads=4, kv_heads=1)
"""Prefill pieces that are merged."""
BUNDLES = Case(kv_lens=(16_641, 300, 40_000, 16_640), q_heads=8, kv_heads=2, head_dim=64)
"""Pieces that are merged by bundles, of a team's own and of several; the most without."""
ALL = {
    "decode": LONG, "verify": VERIFY, "prefill": PREFILL, "mixed": MIXED, "cut": CUT,
    "256": replace(MIXED, head_dim=256), "fp8": replace(LONG, fp8=True),
    "options": replace(MIXED, window=100, softcap=5.0, sinks=True),
    "bundles": BUNDLES, "bundles fp8": replace(BUNDLES, fp8=True),
    "bundles of 16 rows": replace(BUNDLES, kv_heads=1, q_heads=16),
    "large group": replace(VERIFY, q_heads=20, kv_heads=1),
}  # fmt: skip
CASES = pytest.mark.parametrize("case", ALL.values(), ids=ALL)
EACH_BACKEND = pytest.mark.parametrize("backend", BACKENDS)


def alone(case: Case, request: int) -> Case:
    """A request of a case, bounded as if it had come alone."""
    q_len = case.queries[request]
    q_lens = None if case.q_lens is None else (q_len,)
    return replace(case, kv_lens=(case.kv_lens[request],), q_lens=q_lens, max_q_len=max(q_len, 1))


COMPILED = [
    (alone(case, request), backend)
    for case in ALL.values()
    for request in range(case.batch)
    for backend in BACKENDS
]


def rows_of(step: Step, request: int) -> slice:
    start = sum(step.case.queries[:request])
    return slice(start, start + step.case.queries[request])


def picked(step: Step, requests: list[int], *, max_q_len: int, columns: int = 0) -> Step:
    """Some requests of a step, in this order, over the same pages, with outputs of its own.

    `columns` more of the page table bound the lengths otherwise.
    """
    case = step.case
    table = step.page_table[torch.tensor(requests, device=step.q.device)]
    if columns:
        table = torch.cat([table, int32([[-1] * columns] * len(requests))], 1)
    q = torch.cat([step.q[rows_of(step, r)] for r in requests])
    part = replace(
        case,
        kv_lens=tuple(case.kv_lens[r] for r in requests),
        q_lens=None if case.q_lens is None else tuple(case.queries[r] for r in requests),
        max_q_len=max_q_len,
    )
    queries = part.queries
    ends = [sum(queries[:i]) for i in range(len(queries) + 1)]
    tensors = {
        "page_table": table, "q": q, "kv_lens": int32(part.kv_lens),
        "cu_q_lens": None if case.q_lens is None else int32(ends),
        "out": torch.full_like(q, float("nan")),
        "lse": torch.full(q.shape[:2], float("nan"), device=q.device),
        "keys": [step.keys[r] for r in requests], "values": [step.values[r] for r in requests],
    }  # fmt: skip
    return replace(step, case=part, **tensors)


def differing(step: Step, part: Step, requests: list[int]) -> list[int]:
    """Which of the requests have other bits in `part` than in `step`."""
    found = []
    for place, request in enumerate(requests):
        mine, whole = rows_of(part, place), rows_of(step, request)
        same = same_bits(part.out[mine], step.out[whole])
        if not (same and same_bits(part.lse[mine], step.lse[whole])):
            found.append(request)
    return found


def made(case: Case, backend: str | None) -> Step:
    step = make_step(case)
    attend(step, backend=backend)
    check(step)
    return step


@EACH_BACKEND
@CASES
def test_each_request_alone(case, backend):
    """As the host bounds the batch: the same longest query."""
    step = made(case, backend)
    for request in range(case.batch):
        part = picked(step, [request], max_q_len=case.longest_q)
        attend(part, backend=backend)
        assert not differing(step, part, [request])


@CASES
def test_each_request_alone_with_bounds_of_its_own(case):
    """As if it had come alone: its own longest query and another table, so another kernel maybe.

    Of CUDA alone: Triton's tiles, and so the order of its sums, turn with the longest query.
    """
    backend = "cuda"
    step = made(case, backend)
    wrong = []
    for request in range(case.batch):
        own = max(case.queries[request], 1)
        part = picked(step, [request], max_q_len=own, columns=40)
        attend(part, backend=backend)
        wrong += differing(step, part, [request])
    assert not wrong, f"requests {wrong} of {case.queries} queries over {case.kv_lens} keys"


@EACH_BACKEND
@CASES
def test_a_requests_place_does_not_matter(case, backend):
    step = made(case, backend)
    for order in (list(range(case.batch))[::-1], [0, 0, *range(case.batch), 0, 1]):
        part = picked(step, order, max_q_len=case.longest_q)
        attend(part, backend=backend)
        assert not differing(step, part, order)


@EACH_BACKEND
@CASES
def test_every_budget_gives_the_same_bits(case, backend):
    step = made(case, backend)
    out, lse = step.out.clone(), step.lse.clone()
    for num_sms in (1, 3, 16, 17, 48, 100, 131):
        step.poison_outputs()
        attend(step, backend=backend, num_sms=at_most(num_sms))
        assert same_bits(step.out, out), f"{num_sms} SMs"
        assert same_bits(step.lse, lse), f"{num_sms} SMs"


@EACH_BACKEND
@CASES
def test_again_and_again(case, backend):
    """Who brings the last piece differs from launch to launch; the order of the sums does not."""
    step = made(case, backend)
    out, lse = step.out.clone(), step.lse.clone()
    for _ in range(10):
        step.poison_outputs()
        attend(step, backend=backend)
        assert same_bits(step.out, out)
        assert same_bits(step.lse, lse)


@CASES
def test_partitions_and_neighbours(case):
    """Inside partitions, and while the other side works."""
    step = made(case, None)
    out, lse = step.out.clone(), step.lse.clone()
    noise = torch.randn(2048, 2048, device="cuda").bfloat16()
    torch.cuda.synchronize()
    for side, other in neighbours():
        step.poison_outputs()
        torch.cuda.synchronize()
        with other:
            busy = [noise @ noise for _ in range(10)]
        with side:
            attend(step)
        side.synchronize()
        other.synchronize()
        del busy
        assert same_bits(step.out, out)
        assert same_bits(step.lse, lse)


@EACH_BACKEND
def test_what_a_neighbour_holds_does_not_matter(backend):
    """Other requests' keys change, one of them to infinities: nobody else's bits do."""
    step = made(MIXED, backend)
    out = step.out.clone()
    victim = 2
    pages = step.page_table[victim, : MIXED.pages[victim]].long()
    step.k_cache[pages] = float("inf")
    step.v_cache[pages] = float("nan")
    attend(step, backend=backend)
    for request in range(MIXED.batch):
        rows = rows_of(step, request)
        assert request == victim or same_bits(step.out[rows], out[rows])
