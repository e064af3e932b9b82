"""Partitions on a GPU: what is granted is what work reaches, and misuse is refused by name."""

from __future__ import annotations

import pytest
import torch

import smkern
from smkern.errors import BudgetError, PartitionError
from smkern.partition.driver import cuda_driver
from smkern.partition.probe import probe_of


@pytest.fixture(scope="module")
def ladder():
    with smkern.ladder([8, 16, 32, 64]) as made:
        yield made


def test_every_side_is_confined_eagerly_and_replayed(ladder):
    for split in ladder:
        for side in split:
            side.verify()


def test_rungs_are_nested_and_prefill_is_the_rest(ladder):
    total = set(range(smkern.device_info().num_sms))
    before: set[int] = set()
    for split in ladder:
        decode, prefill = set(split.decode.smids), set(split.prefill.smids)
        assert before < decode
        assert decode | prefill == total
        assert split.decode.disjoint(split.prefill)
        assert (split.decode.num_sms, split.prefill.num_sms) == (len(decode), len(prefill))
        before = decode


def test_a_graph_keeps_its_partition_whatever_stream_launches_it(ladder):
    split = ladder.split(decode=32)
    probe = probe_of(split.decode.device)
    out = probe.output(64 * 32)
    with split.decode.capture() as graph:
        probe.launch(split.decode.raw_stream, out)
    graph.replay()
    torch.cuda.current_stream().synchronize()
    assert set(out.tolist()) == set(split.decode.smids)
    out.fill_(-1)
    split.decode.launch(graph)
    split.decode.synchronize()
    assert set(out.tolist()) == set(split.decode.smids)
    with pytest.raises(PartitionError, match="captured on"):
        split.prefill.launch(graph)
    graph.close()


def test_the_default_budget_follows_the_stream(ladder):
    split = ladder.split(decode=16)
    total = smkern.device_info().num_sms
    assert smkern.current_num_sms() == total
    with split.decode:
        assert smkern.current_num_sms() == 16
        with split.prefill:
            assert smkern.current_num_sms() == total - 16
        assert smkern.current_num_sms() == 16
    assert smkern.current_num_sms() == total


def test_many_ctas_an_sm_stay_inside_too(ladder):
    decode = ladder.split(decode=8).decode
    seen = cuda_driver(decode.device).smids(decode.raw_stream, 8 * 200)
    assert set(seen) == set(decode.smids)


def test_eights_and_grid():
    with smkern.ladder([16], atom=8) as made:
        split = made.split(decode=16)
        assert split.decode.clusters
        for side in split:
            side.verify()
    with smkern.ladder([16], backend="grid") as made:
        split = made.split(decode=16)
        split.decode.verify()
        with split.decode:
            assert smkern.current_num_sms() == 16
        with pytest.raises(PartitionError, match="grid"):
            split.decode.disjoint(split.prefill)


@pytest.mark.parametrize("decode", [0, -2, 7, 132, 1000])
def test_counts_that_cannot_be(decode):
    with pytest.raises(BudgetError, match=str(decode)):
        smkern.ladder([decode])
    assert torch.ones(1, device="cuda").item() == 1


def test_eights_end_where_the_drivers_groups_do():
    with pytest.raises(BudgetError, match="at most 120"):
        smkern.ladder([128], atom=8)
    with smkern.ladder(atom=8) as made:
        assert made.rungs[-1] == 120


def test_two_ladders_are_not_known_to_be_disjoint(ladder):
    with smkern.ladder([16]) as other, pytest.raises(PartitionError, match="different ladders"):
        ladder.split(decode=16).decode.disjoint(other.split(decode=16).prefill)


def test_close_refuses_what_lives_and_then_everything_is_refused():
    made = smkern.ladder([16])
    decode = made.split(decode=16).decode
    x = torch.ones(16, device="cuda")
    with decode.capture() as graph:
        x.add_(1)
    with pytest.raises(PartitionError, match="1 graphs"):
        decode.close()
    graph.close()
    with decode:
        own = torch.ones(1 << 20, device="cuda")
    with pytest.raises(PartitionError, match="bytes of tensors"):
        decode.close()
    del own
    made.close()
    assert decode.closed
    for use in (decode.__enter__, decode.verify, lambda: decode.launch(graph), graph.replay):
        with pytest.raises(PartitionError, match="closed"):
            use()
    with pytest.raises(PartitionError, match="closed"):
        made.split(decode=16)
    assert torch.ones(1, device="cuda").item() == 1


def test_ladders_come_and_go():
    for _ in range(5):
        with smkern.ladder([16]) as made:
            made.split(decode=16).decode.verify()


def test_closing_waits_for_the_partitions_graphs():
    x = torch.zeros(1, device="cuda")
    with smkern.ladder([16]) as made:
        decode = made.split(decode=16).decode
        with decode.capture() as graph:
            torch.cuda._sleep(20_000_000)
            x.add_(1)
        for _ in range(5):
            decode.launch(graph)
    assert x.item() == 5


def test_a_split_gemms_workspace_does_not_keep_a_partition_open():
    a = torch.randn(64, 16384, device="cuda").bfloat16()
    w = torch.randn(64, 16384, device="cuda").bfloat16()
    out = torch.empty(64, 64, device="cuda", dtype=a.dtype)
    made = smkern.ladder([16])
    decode = made.split(decode=16).decode
    torch.cuda.synchronize()
    with decode:
        smkern.gemm(a, w, out=out)
    decode.synchronize()
    assert smkern.explain_gemm(64, 64, 16384, num_sms=16, confined="mask").config.split != 1
    made.close()
    assert decode.closed
