"""Who computes attention in a benchmark: smkern as dispatched and by kernel, SDPA, FlashInfer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from smkern.bench.attention.beside import MOST_SMS, OP, beside_cell
from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.cases import Group
from smkern.bench.cells import failed_cell, our_head
from smkern.bench.frame import Bench, Peer, Provider, wrong_result
from smkern.bench.peers import once
from smkern.measure.attention import AttentionCase, AttentionOperands
from smkern.measure.partitions import Partitions, Place
from smkern.measure.timing import Call, Case, run_eagerly, time_interleaved
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem

PLAN_OP = "plan_attention"
TOLERANCE = 2e-2
"""|out - reference| / |reference| of a bf16 result; bf16 probabilities alone give 3e-3."""
PLAN_CALLS = 32
OUR_BACKENDS: dict[str, str | None] = {
    "smkern": None,
    "smkern:cuda": "cuda",
    "smkern:triton": "triton",
}
"""Provider to the `backend` of `smkern.paged_attention`: as dispatched; our CUDA; our Triton."""

SDPA_BACKENDS = {"sdpa:cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa:flash": SDPBackend.FLASH_ATTENTION}


def plan_of(ops: AttentionOperands, place: Place, out: Any = None) -> Any:
    """The plan of a case for a place's budget; refills `out` where given. Nothing is awaited."""
    import smkern

    case = ops.case
    with torch.cuda.stream(place.stream):
        return smkern.plan_attention(
            ops.kv_lens,
            num_q_heads=case.num_q_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            page_size=case.page_size,
            cu_q_lens=None if case.kind == "decode" else ops.cu_q_lens,
            max_q_len=max(case.q_lens),
            max_kv_len=max(case.kv_lens),
            num_tokens=case.num_tokens,
            max_total_kv=ops.pages.num_pages * case.page_size,
            out=out,
        )


def our_call(ops: AttentionOperands, plan: Any, backend: str | None) -> Call:
    """The public operator under a plan that was made before; on the current stream's budget."""
    import smkern

    case, sets, table, kv_lens = ops.case, ops.sets, ops.pages.table, ops.kv_lens
    attention, count = smkern.paged_attention, len(ops.sets)
    options: dict[str, Any] = {"plan": plan, "backend": backend}
    if case.kind != "decode":
        options |= {"cu_q_lens": ops.cu_q_lens, "max_q_len": max(case.q_lens)}

    def call(i: int) -> torch.Tensor:
        one = sets[i % count]
        attention(one.q, one.k, one.v, table, kv_lens, out=one.out, **options)
        return one.out

    return call


def selection(ops: AttentionOperands, plans: list[Any], backend: str | None) -> dict[str, str]:
    """The configuration that dispatch chose under a plan, and from where it took it."""
    from smkern.ops.attention.dispatch import attention_dispatcher

    plan, dispatcher = plans[0], attention_dispatcher(ops.kv_lens.get_device())
    problem = AttentionProblem(plan.shape, "bf16", ops.case.cache_dtype)
    selection = dispatcher.select(problem, plan.budget, backend)
    return {"config": describe(selection.config), "source": selection.source}


def describe(config: AttentionConfig) -> str:
    """A configuration in one word: its kernel and what differs from a default: `cuda:teams=2`."""
    default = AttentionConfig(config.kernel)
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    unusual = [f"{n}={v}" for n, v in values.items() if v != getattr(default, n)]
    return ":".join([config.kernel, *unusual])


def sdpa_call(ops: AttentionOperands, backend: SDPBackend) -> Call:
    """torch's dense attention on contiguous K and V without pages; only for dense cases.

    A backend that refuses grouped heads gets K and V with a head for each query head, copied
    before anything is timed.
    """
    sets = [ops.dense(i) for i in range(ops.case.num_sets)]
    count, grouped = len(sets), True

    def call(i: int) -> torch.Tensor:
        q, k, v = sets[i % count]
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)

    try:
        call(0)
    except RuntimeError:
        group = ops.case.num_q_heads // ops.case.num_kv_heads
        repeat = partial(torch.repeat_interleave, repeats=group, dim=1)
        sets = [(q, repeat(k), repeat(v)) for q, k, v in sets]
        grouped = False
    return call


@dataclass(slots=True)
class AttentionBench(Bench[AttentionCase]):
    """smkern by kernel, FlashInfer's ways, torch's SDPA, and the plan by itself; on one case."""

    ops: AttentionOperands
    flashinfer: FlashInfer
    budget_us: float = 150_000.0
    others: list[Peer] = field(init=False)

    def __post_init__(self) -> None:
        found = self.flashinfer.calls(self.ops)
        self.others = [(provider, {"layout": layout}, make) for provider, layout, make in found]
        if self.ops.case.is_dense:
            for provider, backend in SDPA_BACKENDS.items():
                self.others.append((provider, {}, once(partial(sdpa_call, self.ops, backend))))

    def ours(self, case: AttentionCase, place: Place) -> Iterator[Provider]:
        """Our providers in one place, over one plan: they run one after another."""
        plans: list[Any] = []

        def make(backend: str | None) -> Call:
            if not plans:
                plans.append(plan_of(self.ops, place))
                torch.cuda.synchronize()
            return our_call(self.ops, plans[0], backend)

        for provider, backend in OUR_BACKENDS.items():
            tell = partial(selection, self.ops, plans, backend)
            yield Provider(provider, place, partial(make, backend), {"layout": "HND"}, tell)

    def reset(self, case: AttentionCase) -> None:
        self.ops.reference()
        self.ops.poison()

    def complaint(self, case: AttentionCase, provider: Provider, result: Any) -> str | None:
        out = result.reshape(self.ops.reference().shape)
        return wrong_result(self.ops.error(out), TOLERANCE)

    def more(
        self, group: Group[AttentionCase], partitions: Partitions, cells: list[dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        """The plan by itself: refilled on the device, many times in one graph. Decode on few SMs
        beside a neighbour.
        """
        place = partitions.at(group.num_sms)
        if place is None:
            return
        yield self._plan_cell(group, place)
        other = partitions.at(partitions.full.num_sms - group.num_sms)
        if group.case.kind == "decode" and group.num_sms <= MOST_SMS and other is not None:
            yield self._beside_cell(group.case, place, other)

    def _beside_cell(self, case: AttentionCase, place: Place, other: Place) -> dict[str, Any]:
        try:
            call = our_call(self.ops, plan_of(self.ops, place), None)
            return beside_cell(case, call, place, other)
        except Exception as error:  # noqa: BLE001  a cell that cannot be measured says why
            return our_head(OP, case.about | {"beside": "dense"}, place) | failed_cell(error)

    def _plan_cell(self, group: Group[AttentionCase], place: Place) -> dict[str, Any]:
        cell = our_head(PLAN_OP, group.case.about, place)
        try:
            plan = plan_of(self.ops, place)
            refill = partial(plan_of, self.ops, place, plan)
            case = Case(lambda i: refill(), place.stream, PLAN_CALLS)
            run_eagerly(case.call, place.stream)
            timing = time_interleaved({"plan": case}, rounds=7)["plan"]
        except Exception as error:  # noqa: BLE001  a cell that cannot be measured says why
            return cell | failed_cell(error)
        return cell | {"us": round(timing.us_median, 3), "noise": round(timing.noise, 4)}
