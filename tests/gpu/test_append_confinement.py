"""The append's CTAs stay on their SMs: seen by %smid, by mask and by grid, eagerly and replayed."""

from __future__ import annotations

import pytest
import torch

import smkern
from smkern.ops.rope import Rope
from smkern.tuning.append import AppendConfig, Budget
from tests.gpu.append_support import capability, check, cloned
from tests.gpu.append_trace import TracedAppend
from tests.gpu.attention.support import at_most
from tests.gpu.confinement import check_capped, check_masked, check_replayed
from tests.gpu.gemm_support import Holder, finishes
from tests.ops.append_cases import Case, make

CASE = Case(((700, 900), (1, 40), (300, 300), (8, 64)), q_heads=32, kv_heads=8, head_dim=128,
            dtype=torch.bfloat16, rope=Rope(128), norm=True)  # fmt: skip
CONFIGS = pytest.mark.parametrize("config", [AppendConfig(4, 4), AppendConfig(16, 1)], ids=str)


class Traced(TracedAppend):
    """The append of the case by a configuration in a budget."""

    def __init__(self, config: AppendConfig, budget: Budget) -> None:
        super().__init__(make(CASE, "cuda"), config, budget, capability())

    def reset(self) -> None:
        for x in (self.out, *self.made[0][3:5]):
            x.fill_(torch.nan)
        torch.cuda.synchronize()

    def check(self) -> None:
        made = cloned(self.made)
        made[0][3].fill_(torch.nan)
        made[0][4].fill_(torch.nan)
        check(made, self.made, self.out)


@CONFIGS
def test_the_mask_confines_every_cta(ladder, config):
    for decode in (16, 40):
        for partition in ladder.split(decode=decode):
            budget = Budget(partition.num_sms, "mask", partition.clusters)
            check_masked(Traced(config, budget), partition)


@CONFIGS
def test_the_mask_confines_a_replayed_graph(ladder, config):
    partition = ladder.split(decode=16).decode
    check_replayed(Traced(config, Budget(16, "mask", partition.clusters)), partition)


@CONFIGS
@pytest.mark.parametrize("num_sms", [1, 7, 24, 100])
def test_the_grid_caps_the_sms(config, num_sms):
    num_sms = at_most(num_sms)
    check_capped(Traced(config, Budget(num_sms, "grid")), num_sms)


def test_a_spinning_neighbour_does_not_hold_it_up(ladder):
    """Every SM outside the partition is taken: what ends can only have run inside."""
    holder = Holder()
    split = ladder.split(decode=40)
    made = make(CASE, "cuda")
    out = torch.empty_like(made[0][0])
    torch.cuda.synchronize()
    with split.decode:
        smkern.qk_norm_rope_append(*made[0], **made[1], out=out)
    split.decode.synchronize()
    with holder.hold(split.prefill.stream, split.prefill.num_sms):
        with split.decode:
            smkern.qk_norm_rope_append(*made[0], **made[1], out=out)
        assert finishes(split.decode.stream, 2.0), "the append waits for SMs outside its partition"
