"""The eager path on a fake device: what reaches the kernels, what is checked each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smkern.errors import ArgumentError, BudgetError, DeviceError, WarmupError
from smkern.kernels.attention.items import OVERFLOW
from smkern.ops.attention.check import check_plan
from smkern.ops.reference import attention as reference
from smkern.tuning.attention.select import select_attention
from smkern.tuning.attention.shapes import Budget
from tests.ops.attention.cases import FP8, SIZES, Case, make
from tests.ops.tensors import misplaced

DECODE = Case(lengths=((1, 37), (1, 5), (1, 0)), dtype=torch.bfloat16)
MIXED = Case(lengths=((1, 37), (3, 40), (0, 4), (9, 9)))


def planned(device, made, **changes):
    given = {name: x for name, x in made.options.items()
             if name in ("cu_q_lens", "max_q_len", "causal", "window")}  # fmt: skip
    return device.plan(made.args[4], **(SIZES | given | changes))


CASES = [
    DECODE,
    MIXED,
    replace(MIXED, flat=True, heads_first=True),
    replace(MIXED, options={"window": 3, "softcap": 2.0, "scale": 0.3}),
    replace(MIXED, options={"sinks": True, "causal": False}),
    replace(DECODE, cache_dtype=FP8, options={"k_scale": 0.5, "v_scale": torch.tensor([3.0])}),
    replace(DECODE, cache_dtype=FP8, options={"k_scale": torch.tensor([3.0]), "v_scale": 0.5}),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_plan", [True, False])
def test_values_and_pointers(device, case, with_plan):
    made = make(case)
    want, want_lse = reference.paged_attention(*made.args, **made.options)
    options = made.options | {"plan": planned(device, made) if with_plan else None}
    out, lse = device.attend(*made.args, **options, return_lse=True, check=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    into, log = torch.full_like(out, float("nan")), torch.empty_like(lse)
    assert device.attend(*made.args, **options, out=into, lse=log)[0] is into
    assert torch.equal(into, want)
    assert torch.equal(log, want_lse)
    assert device.attend(*made.args, **options)[1] is None
    assert device.kernels.launches[-1][2].lse == 0


def test_views_are_served_without_a_copy(device):
    made = make(replace(DECODE, dtype=torch.float16))
    q, k_cache, v_cache, table, kv_lens = made.args
    fused = torch.randn(3, 8, 64).half()
    fused[:, :4] = q
    both = torch.stack([k_cache, v_cache], 1)
    out = torch.full((3, 6, 64), float("nan")).half()[:, 1:5]
    wide = torch.full((3, 9), -1).int()
    wide[:, : table.shape[1]] = table
    args = (fused[:, :4], both[:, 0], both[:, 1], wide[:, : table.shape[1]], kv_lens)
    device.attend(*args, out=out)
    assert torch.equal(out, reference.paged_attention(*made.args)[0])
    assert device.kernels.prepared[-1][1].kernel == "cuda"
    # a slice of the very buffer that the queries lie in is no overlap
    device.attend(*args, out=fused[:, 4:])
    assert torch.equal(fused[:, 4:], out)


def test_one_plan_serves_layers_and_is_made_anew_by_one_launch(device):
    made = make(DECODE)
    plan = planned(device, made)
    for _ in range(3):
        device.attend(*made.args, plan=plan)
    assert [name for name, *_ in device.kernels.launches] == ["plan", *["cuda"] * 3]
    args = device.kernels.launches[-1][2]
    assert (args.plan, args.workspace) == (plan.buffer.data_ptr(), plan.workspace.data_ptr())
    shorter = torch.tensor([3, 5, 1], dtype=torch.int32)
    assert device.plan(shorter, **SIZES, out=plan) is plan
    assert device.kernels.launches[-1] == ("plan", 7, plan.buffer.data_ptr())
    out, _ = device.attend(*made.args, plan=plan)
    assert torch.equal(out, reference.paged_attention(*made.args[:4], shorter)[0])
    assert len(device.kernels.planned) == len(device.kernels.prepared) == 1


def test_a_call_without_a_plan_makes_one_for_the_whole_table(device):
    made = make(MIXED)
    device.attend(*made.args, **made.options)
    assert [name for name, *_ in device.kernels.launches] == ["plan", "cuda"]
    shape, _ = device.kernels.planned[-1]
    assert (shape.max_kv_len, shape.max_total_kv) == (4 * 16, 4 * 4 * 16)
    assert device.kernels.launches[-1][2].plan % 256 == 0
    assert device.kernels.launches[-1][2].workspace % 256 == 0
    made = make(replace(MIXED, flat=True))
    device.attend(*made.args, **made.options)
    shape, _ = device.kernels.planned[-1]
    assert shape.max_kv_len == shape.max_total_kv == made.args[3].shape[0] * 16


def test_a_second_call_prepares_nothing(device):
    made = make(DECODE)
    for _ in range(3):
        for num_sms in (None, 16):
            plan = planned(device, made, num_sms=num_sms)
            device.attend(*made.args, plan=plan, num_sms=num_sms)
    assert [budget for *_, budget in device.kernels.prepared] == [
        Budget(132, "grid", True),
        Budget(16, "grid", True),
    ]
    assert len(device.kernels.planned) == 2
    assert len(device.eager.records) == 2


def test_the_streams_partition_is_the_default_and_the_limit(device):
    made = make(DECODE)
    whole = planned(device, made)
    device.stream = 8
    with pytest.raises(ArgumentError, match="plan is a plan for 132 SMs, this call has 32"):
        device.attend(*made.args, plan=whole)
    plan = planned(device, made)
    assert plan.budget == Budget(32, "mask", False)
    device.attend(*made.args, plan=plan)
    assert device.kernels.prepared[-1][2] == Budget(32, "mask", False)
    assert device.kernels.launches[-1][1] == 8
    with pytest.raises(BudgetError, match="above the 32 SMs"):
        planned(device, made, num_sms=48)
    with pytest.raises(BudgetError, match="above the 32 SMs"):
        device.attend(*made.args, num_sms=48)
    for wrong in (True, 0, 1.5):
        with pytest.raises(BudgetError):
            device.attend(*made.args, num_sms=wrong)


def test_strides_that_the_cuda_kernels_do_not_take_get_tritons(device):
    made = make(DECODE)
    q, k_cache, v_cache, *rest = made.args
    apart = padded(k_cache, 1)
    want = reference.paged_attention(*made.args)[0]
    assert torch.equal(device.attend(q, apart, v_cache, *rest)[0], want)
    assert device.kernels.prepared[-1][1].kernel == "triton"
    device.attend(q, k_cache, v_cache, *rest)
    assert device.kernels.prepared[-1][1].kernel == "cuda"
    assert torch.equal(device.attend(misplaced(q), k_cache, v_cache, *rest)[0], want)
    assert device.kernels.launches[-1][0] == "triton"
    with pytest.raises(ArgumentError, match=r"backend='cuda' cannot run .* differ"):
        device.attend(q, apart, v_cache, *rest, backend="cuda")


def padded(x, count):
    return torch.zeros(*x.shape[:-1], 64 + count, dtype=x.dtype)[..., :64].copy_(x)


REFUSED = [
    (lambda q, k, v, out: (q, k, padded(v, 64), out), r"K strides .* and V strides .* differ"),
    (lambda q, k, v, out: (q, padded(k, 1), padded(v, 1), out), "not 32 bytes aligned"),
    (lambda q, k, v, out: (q, misplaced(k), misplaced(v), out), "not 32 bytes aligned"),
    (lambda q, k, v, out: (padded(q, 1), k, v, out), "rows of q are not 16 bytes aligned"),
    (lambda q, k, v, out: (misplaced(q), k, v, out), "rows of q are not 16 bytes aligned"),
    (lambda q, k, v, out: (q, k, v, padded(out, 2)), "rows of out are not 16 bytes aligned"),
    (lambda q, k, v, out: (q, k, v, padded(out, 4)), "rows of out are not 16 bytes aligned"),
    (lambda q, k, v, out: (q, k, v, misplaced(out)), "rows of out are not 16 bytes aligned"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED)
@pytest.mark.parametrize("table", [None, "cuda"])
@pytest.mark.parametrize("backend", [None, "model"])
def test_what_cuda_refuses_triton_runs(make_device, change, reason, table, backend):
    """Silently where dispatch chooses, a tuned cell included; by name where "cuda" is asked for."""
    device, made = make_device(table=table), make(DECODE)
    q, k_cache, v_cache, *rest = made.args
    *args, out = change(q, k_cache, v_cache, torch.zeros_like(q))
    device.attend(*args, *rest, out=out, backend=backend)
    assert torch.equal(out, reference.paged_attention(*made.args)[0])
    assert device.kernels.launches[-1][0] == "triton"
    out.fill_(7.0)
    with pytest.raises(ArgumentError, match=f"backend='cuda' cannot run this call: .*{reason}"):
        device.attend(*args, *rest, out=out, backend="cuda")
    assert (out == 7.0).all()


def test_an_expanded_cache_is_for_triton(make_device):
    device, made = make_device(), make(DECODE)
    q, k_cache, v_cache, *rest = made.args
    one = [x[:1].expand_as(x) for x in (k_cache, v_cache)]
    out = torch.zeros_like(q)
    device.attend(q, *one, *rest, out=out)
    assert torch.equal(out, reference.paged_attention(q, *one, *rest)[0])
    with pytest.raises(ArgumentError, match=r"backend='cuda' cannot run .* a stride is 0"):
        device.attend(q, *one, *rest, backend="cuda")


def test_a_device_without_the_cuda_kernels_names_it(make_device):
    device, made = make_device((8, 0), choose=select_attention), make(DECODE)
    device.attend(*made.args)
    assert device.kernels.launches[-1][0] == "triton"
    with pytest.raises(ArgumentError, match=r"kernel 'cuda' cannot run .* capability 8\.0"):
        device.attend(*made.args, backend="cuda")
    with pytest.raises(ArgumentError, match=r"use None or one of \['cuda', 'triton', 'model'\]"):
        device.attend(*made.args, backend="cutlass")


def test_a_scale_that_is_not_positive_is_refused_before_any_kernel(device):
    made = make(replace(DECODE, cache_dtype=FP8))
    for bad in ({"scale": 0.0}, {"scale": -0.1}, {"k_scale": -1.0}):
        for backend in (None, "cuda", "triton"):
            with pytest.raises(ArgumentError, match="pass a finite number above 0"):
                device.attend(*made.args, **bad, backend=backend)
    assert not device.kernels.launches


def test_strides_that_nothing_steps_over_do_not_count(device):
    """A single token, page or head may have any stride: its request has the bits of any other."""
    made = make(replace(DECODE, lengths=((1, 7),), kv_heads=1, q_heads=1))
    q, k_cache, v_cache, *rest = made.args
    want = device.attend(*made.args)[0]
    odd = [torch.as_strided(x, x.shape, (*[13 if n == 1 else s for n, s in
           zip(x.shape, x.stride(), strict=True)],)) for x in (q, k_cache, v_cache)]  # fmt: skip
    assert torch.equal(device.attend(*odd, *rest)[0], want)
    assert [name for name, *_ in device.kernels.launches] == ["plan", "cuda"] * 2


def test_a_capture_needs_the_variant_of_its_alignment(device):
    made = make(DECODE)
    q, *rest = made.args
    shifted = misplaced(q)
    device.attend(*made.args, backend="triton")
    device.is_capturing = True
    device.attend(*made.args, backend="triton", num_sms=8)
    with pytest.raises(WarmupError, match="16-byte aligned: False"):
        device.attend(shifted, *rest)
    device.is_capturing = False
    device.attend(shifted, *rest)
    device.is_capturing = True
    device.attend(shifted, *rest, num_sms=8)


def test_backends(make_device):
    made = make(DECODE)
    device = make_device(table="triton")
    device.attend(*made.args)
    device.attend(*made.args, backend="model")
    device.attend(*made.args, backend="triton")
    kernels = [name for name, *_ in device.kernels.launches if name != "plan"]
    assert kernels == ["triton", "cuda", "triton"]
    with pytest.raises(ArgumentError, match="backend='own'"):
        device.attend(*made.args, backend="own")


def test_a_capture_uses_what_is_loaded_and_refuses_the_rest(device):
    made = make(DECODE)
    device.is_capturing = True
    with pytest.raises(WarmupError, match=r"plan_attention once, before"):
        planned(device, made)
    with pytest.raises(WarmupError, match=r"attention of 4 query .* smkern.warmup\(attention"):
        device.attend(*made.args)
    device.is_capturing = False
    device.attend(*made.args, plan=planned(device, made))
    device.is_capturing = True
    plan = planned(device, made)
    device.attend(*made.args, plan=plan)
    device.attend(*made.args)
    with pytest.raises(ArgumentError, match="check=True reads device memory"):
        device.attend(*made.args, plan=plan, check=True)
    with pytest.raises(ArgumentError, match="check=True reads device memory"):
        planned(device, made, check=True)


def test_overlap_is_checked_in_every_call(device):
    made = make(DECODE)
    q, *rest = made.args
    room = torch.zeros(6, 4, 64, dtype=q.dtype)
    room[:3] = q
    device.attend(room[:3], *rest, out=room[3:])
    with pytest.raises(ArgumentError, match=r"out at .* overlaps q"):
        device.attend(room[:3], *rest, out=room[2:5])
    with pytest.raises(ArgumentError, match=r"out at .* overlaps q"):
        device.attend(room[:3], *rest, out=room[:3])
    plan = planned(device, made, max_kv_len=4096)
    inside = plan.workspace[: 3 * 4 * 64 * 2].view(torch.bfloat16).view(3, 4, 64)
    with pytest.raises(ArgumentError, match=r"out at .* overlaps plan.workspace"):
        device.attend(q, *rest, out=inside, plan=plan)
    both = torch.zeros(3 * 4 * 64 * 2, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match=r"out at .* overlaps lse"):
        device.attend(
            q,
            *rest,
            out=both.view(q.dtype).view(3, 4, 64),
            lse=both[:48].view(torch.float32).view(3, 4),
        )


@pytest.mark.parametrize(("tokens", "batch"), [(0, 0), (0, 2), (3, 0)])
def test_nothing_to_do_launches_nothing(device, tokens, batch):
    q, cache = torch.zeros(tokens, 4, 64).half(), torch.zeros(batch, 16, 2, 64).half()
    args = (q, cache, cache, torch.zeros(batch, 2).int(), torch.zeros(batch).int())
    ragged = {"cu_q_lens": torch.zeros(batch + 1).int(), "max_q_len": 4}
    out, lse = device.attend(*args, **ragged, return_lse=True, check=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:2])
    plan = device.plan(args[4], **SIZES, **ragged, num_tokens=tokens, check=True)
    device.attend(*args, **ragged, plan=plan)
    assert [name for name, *_ in device.kernels.launches] == (["plan"] if batch else [])


def test_a_plan_that_dropped_items_is_named(device):
    made = make(DECODE)
    plan = planned(device, made)
    plan.buffer[OVERFLOW] = 4
    with pytest.raises(ArgumentError, match="the plan dropped 4 items"):
        check_plan(plan)


def test_old_gpus_and_fp32_are_refused(make_device, device):
    made = make(DECODE)
    with pytest.raises(DeviceError, match=r"7\.5"):
        make_device(capability=(7, 5)).attend(*made.args)
    made = make(replace(DECODE, dtype=torch.float32))
    with pytest.raises(ArgumentError, match=r"torch.float32 on a GPU"):
        device.attend(*made.args)
