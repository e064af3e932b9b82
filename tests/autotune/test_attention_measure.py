"""How an attention cell is measured, on a device that is not there: checks, rounds, the choice."""

from dataclasses import dataclass, field
from math import isnan, nan
from types import SimpleNamespace

import pytest

from smkern.autotune import measure
from smkern.autotune.attention import FAMILY, AttentionTuner
from smkern.autotune.attention_cases import Heads, tuned_cases
from smkern.autotune.raw import Measurement
from smkern.errors import ArgumentError
from smkern.kernels.attention.args import AttentionArguments
from smkern.measure.attention import AttentionOperands
from smkern.tuning.attention.select import ATTENTION_FAMILY
from smkern.tuning.attention.shapes import AttentionConfig, Budget

DEFAULT, OTHER, WRONG, TURNED, REFUSED = (AttentionConfig("cuda", teams=n) for n in range(1, 6))
SPEED = {DEFAULT: 20.0, OTHER: 10.0}
PLACE = SimpleNamespace(budget=Budget(32, "mask", False), stream=SimpleNamespace(cuda_stream=7))


@dataclass
class FakeDispatcher:
    """Writes torch's result into set 0's output; notes plans and launches."""

    operands: AttentionOperands
    profile: object
    plans: list = field(default_factory=list)
    launches: list = field(default_factory=list)

    def plan(self, shape, budget):
        return lambda *addresses: self.plans.append((budget, *addresses))

    def launch(self, problem, config, budget):
        if config == REFUSED:
            raise ArgumentError("no such team: use fewer")

        def bind(sizes):
            def launch(stream, *addresses):
                args = AttentionArguments.of(addresses, sizes)
                self.launches.append((config, args, stream))
                first = self.operands.sets[0]
                if args.out == first.out.data_ptr():
                    first.out.copy_(self.operands.reference() * (2 if config == WRONG else 1))
                    if config == TURNED:
                        first.out[0, 0, 0] *= 1.01

            return launch

        return bind


@pytest.fixture(params=["decode", "prefill"])
def tuner(request, profile):
    steps = {"batches": (2,), "lengths": (40,), "prompts": ()}
    if request.param == "prefill":
        steps = {"batches": (), "lengths": (), "prompts": (40,)}
    (case,) = tuned_cases([Heads(4, 2, 64)], **steps)
    operands = AttentionOperands(case, device="cpu")
    return AttentionTuner(FakeDispatcher(operands, profile), operands)


def measure_all(tuner, *configs):
    problem = tuner.operands.case.problem
    return tuner.measure(problem, PLACE, dict.fromkeys(configs, 12.0))


def test_every_candidate_is_checked_and_the_good_ones_are_timed(tuner, timed):
    found = measure_all(tuner, DEFAULT, OTHER, WRONG, TURNED, REFUSED)
    assert [item.config for item in found[:2]] == [DEFAULT, OTHER]
    assert [item.us for item in found[:2]] == [20.0, 10.0]
    errors = {item.config: item.error for item in found[2:]}
    assert errors[WRONG].startswith("wrong result: |x - reference| / |reference| is 1")
    assert "other bits" in errors[TURNED]
    assert errors[REFUSED] == "ArgumentError: no such team: use fewer"
    assert all(isnan(item.us) for item in found[2:])
    ((names, rounds, calls),) = timed
    assert len(names) == 2
    assert 1 <= rounds <= 3
    assert all(1 <= n <= measure.CALLS_A_GRAPH for n in calls)


def test_launches_have_the_cases_addresses(tuner, timed):
    measure_all(tuner, DEFAULT)
    ops, dispatcher = tuner.operands, tuner.dispatcher
    _, args, stream = dispatcher.launches[0]
    one = ops.sets[0]
    assert stream == 7
    assert (args.q, args.k, args.v, args.out) == tuple(
        x.data_ptr() for x in (one.q, one.k, one.v, one.out)
    )
    assert args.k_strides == one.k.stride()[:3]
    assert args.num_tokens == one.q.shape[0]
    assert args.table_len == ops.pages.table.shape[1]
    budget, kv_lens, cu_q_lens, plan, workspace, plan_stream = dispatcher.plans[0]
    assert (budget, plan_stream) == (PLACE.budget, 7)
    assert (kv_lens, plan, workspace) == (ops.kv_lens.data_ptr(), args.plan, args.workspace)
    decode = ops.case.kind == "decode"
    assert cu_q_lens == (0 if decode else ops.cu_q_lens.data_ptr())


def test_a_failed_launch_leaves_no_counts(tuner, timed):
    measure_all(tuner, DEFAULT, TURNED)
    first, again = tuner.dispatcher.plans
    assert first == again, "in place: calls that are fine have its addresses"


def measured(tuner, times):
    problem = tuner.operands.case.problem
    return [
        Measurement(problem, PLACE.budget, config, us, 0.01, 5.0, error, op=tuner.name)
        for config, (us, error) in times.items()
    ]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({DEFAULT: (10.1, None), OTHER: (10.0, None)}, DEFAULT),
        ({DEFAULT: (11.0, None), OTHER: (10.0, None)}, OTHER),
        ({DEFAULT: (nan, "failed"), OTHER: (10.0, None)}, OTHER),
    ],
)
def test_the_default_stays_where_it_is_as_fast(tuner, times, chosen):
    cell = FAMILY.best(measured(tuner, times))
    assert cell.config == chosen


def test_a_measurement_as_a_line(tuner):
    good, bad = measured(tuner, {OTHER: (10.0, None), WRONG: (nan, "wrong")})
    row = good.to_json()
    assert row["config"] == {"kernel": "cuda", "teams": 2}
    assert (row["us"], row["num_sms"], row["confined"]) == (10.0, 32, "mask")
    assert "us" not in bad.to_json()
    assert bad.to_json()["error"] == "wrong"
    key = ATTENTION_FAMILY.key_of(good.problem, good.budget)
    assert ATTENTION_FAMILY.codec.encode(key, FAMILY.best([good]))["path"] in ("decode", "prefill")
