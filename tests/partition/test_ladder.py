"""Ladders and their partitions, against a fake driver and fake torch streams."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smkern
from smkern.device import Budget
from smkern.errors import BudgetError, ConfinementError, DeviceError, PartitionError
from smkern.partition import current_num_sms
from tests.partition.conftest import EIGHTS, FakeDriver, FakeStream, Machine, fake_machine

PAIRS = st.permutations(range(66))


@pytest.fixture
def ladder(machine: Machine) -> smkern.Ladder:
    made = smkern.ladder([16, 32])
    assert made.backend == "green"
    return made


@settings(max_examples=25)
@given(PAIRS, st.sets(st.integers(1, 65), min_size=1, max_size=8))
def test_rungs_are_nested_and_prefill_is_exactly_the_rest(pairs: list[int], halves: set[int]):
    rungs = [2 * half for half in sorted(halves)]
    with fake_machine(FakeDriver(pairs)) as machine:
        ladder = smkern.ladder(reversed(rungs))
        assert ladder.rungs == tuple(rungs)
        below: set[int] = set()
        for rung, split in zip(rungs, ladder, strict=True):
            decode, prefill = split
            assert split is ladder.split(decode=rung)
            assert set(decode.smids) | set(prefill.smids) == set(range(132))
            assert decode.disjoint(prefill)
            assert prefill.disjoint(decode)
            assert below <= set(decode.smids)
            below = set(decode.smids)
            for side, count in ((decode, rung), (prefill, 132 - rung)):
                assert side.requested == side.num_sms == len(side.smids) == count
                assert side.confined == "mask"
                assert machine.budgets.budget(side.raw_stream) == side.budget
        ladder.close()
        assert not machine.driver.contexts


@settings(max_examples=25)
@given(PAIRS, st.integers(1, EIGHTS))
def test_eights_leave_the_remainder_to_prefill(pairs: list[int], eighths: int) -> None:
    with fake_machine(FakeDriver(pairs)) as machine:
        split = smkern.split(decode=8 * eighths, atom=8)
        left_over = set(machine.driver.sms[8 * EIGHTS :])
        assert left_over <= set(split.prefill.smids)
        assert (split.decode.num_sms, split.prefill.num_sms) == (8 * eighths, 132 - 8 * eighths)
        assert split.decode.clusters
        assert split.prefill.clusters


def test_default_rungs(machine: Machine) -> None:
    assert smkern.ladder().rungs == tuple(range(8, 125, 8))
    assert smkern.ladder(atom=8).rungs == tuple(range(8, 121, 8))


def test_eights_end_where_the_drivers_groups_do(machine: Machine) -> None:
    with pytest.raises(BudgetError, match=r"\[128\] SMs: the driver gives 15 .* at most 120"):
        smkern.ladder([64, 128], atom=8)
    assert not machine.driver.contexts


def test_only_the_large_side_of_pairs_has_clusters(machine: Machine) -> None:
    for rung, small, large in ((32, "decode", "prefill"), (100, "prefill", "decode")):
        split = smkern.split(decode=rung)
        assert not getattr(split, small).clusters
        assert getattr(split, large).clusters


def test_the_driver_has_the_last_word_on_clusters(machine: Machine) -> None:
    machine.patch.setattr(machine.driver, "clusters", lambda stream: False)
    assert not any(side.clusters for side in smkern.split(decode=64, atom=8))


@pytest.mark.parametrize("backend", [None, "green", "grid"])
@pytest.mark.parametrize("bad", [0, 1, 17, -2, -16, 132, 134, 1000])
def test_a_count_that_cannot_be_names_value_limit_and_remedy(machine, bad, backend) -> None:
    with pytest.raises(BudgetError) as raised:
        smkern.ladder([16, bad], backend=backend)
    words = str(raised.value)
    assert f"decode side of {bad} SMs" in words
    assert "132 SMs" in words
    assert "a multiple of 2 from 2 to 130" in words
    assert machine.driver.created == machine.driver.plain_streams == 0


@settings(max_examples=50)
@given(st.integers(), st.sampled_from([2, 4, 8]))
def test_a_count_is_served_or_refused(count: int, atom: int) -> None:
    fits = 0 < count < 132 and count % atom == 0
    with fake_machine():
        if fits:
            assert smkern.split(decode=count, atom=atom, backend="grid").decode.num_sms == count
            return
        with pytest.raises(BudgetError, match=f"of {count} SMs .*multiple of {atom} from {atom}"):
            smkern.split(decode=count, atom=atom, backend="grid")


@pytest.mark.parametrize("atom", [0, -2, 67, 132, 134])
def test_an_atom_that_cannot_be(machine: Machine, atom: int) -> None:
    with pytest.raises(BudgetError, match=f"atom={atom}"):
        smkern.ladder(atom=atom)
    with pytest.raises(BudgetError, match=f"atom={atom}"):
        smkern.ladder([32], atom=atom)


def test_a_ladder_without_a_rung_is_refused(machine: Machine) -> None:
    with pytest.raises(BudgetError, match="needs a rung"):
        smkern.ladder([])


def test_unknown_words_are_refused(machine: Machine) -> None:
    with pytest.raises(PartitionError, match="no backend 'blue'"):
        smkern.ladder([32], backend="blue")  # type: ignore[arg-type]
    with pytest.raises(PartitionError, match="no placement 'dense'"):
        smkern.ladder([32], placement="dense")  # type: ignore[arg-type]


def test_the_drivers_order_is_kept_on_request() -> None:
    pairs = [*range(65, -1, -1)]
    with fake_machine(FakeDriver(pairs)):
        assert smkern.split(decode=4, placement="default").decode.smids == (128, 129, 130, 131)
        assert smkern.split(decode=4).decode.smids == (0, 1, 2, 3)


def test_grid_pairs(machine: Machine) -> None:
    ladder = smkern.ladder([2, 32, 130], backend="grid")
    assert ladder.backend == "grid"
    assert ladder.rungs == (2, 32, 130)
    for decode, prefill in ladder:
        assert decode.num_sms + prefill.num_sms == 132
        for side in (decode, prefill):
            assert side.budget == Budget(side.num_sms, "grid", clusters=True)
            assert machine.budgets.budget(side.raw_stream) == side.budget
            assert side.smids == ()
        with pytest.raises(PartitionError, match="backend='green'"):
            decode.disjoint(prefill)


def test_grid_partitions_share_no_stream_with_each_other_or_with_torchs_pool(machine) -> None:
    ladder = smkern.ladder(range(2, 132, 2), backend="grid")
    sides = [side for split in ladder for side in split]
    assert len({side.raw_stream for side in sides}) == len(sides) == 130
    assert all(machine.budgets.budget(side.raw_stream) == side.budget for side in sides)
    ladder.close()
    others = [split.decode for split in smkern.ladder(backend="grid")]
    assert not {side.raw_stream for side in sides} & {side.raw_stream for side in others}
    pooled = torch.cuda.Stream().cuda_stream
    assert machine.budgets.budget(pooled) == machine.budgets.whole


def test_without_green_contexts_the_grid_serves(machine: Machine) -> None:
    machine.driver.failing = 1
    ladder = smkern.ladder([16, 32])
    assert (ladder.backend, ladder.rungs) == ("grid", (16, 32))
    assert ladder.split(decode=32).prefill.num_sms == 100


def test_without_green_contexts_green_is_refused(machine: Machine) -> None:
    machine.driver.failing = 1
    with pytest.raises(DeviceError, match="cuGreenCtxCreate"):
        smkern.ladder([16, 32], backend="green")


def test_an_unknown_rung_names_the_known_ones(ladder: smkern.Ladder) -> None:
    with pytest.raises(BudgetError, match=r"no rung of 24 .* has \[16, 32\]"):
        ladder.split(decode=24)
    with pytest.raises(BudgetError, match=r"no rung of \[16\] .* has \[16, 32\]"):
        ladder.split(decode=[16])  # type: ignore[arg-type]


PROBES = 7
"""Contexts in which 66 pairs are told apart."""


@pytest.mark.parametrize("failing", range(1, PROBES + 2 * 3 + 1))
def test_a_ladder_that_fails_midway_leaves_no_context(machine: Machine, failing: int) -> None:
    machine.driver.failing = failing
    with pytest.raises(DeviceError):
        smkern.ladder([16, 32, 48], backend="green")
    assert not machine.driver.contexts


def test_a_grant_of_fewer_sms_is_refused(machine: Machine) -> None:
    machine.driver.lost = 2
    with pytest.raises(PartitionError, match="granted 14 SMs for groups that have 16"):
        smkern.ladder([16])
    assert not machine.driver.contexts
    assert not machine.driver.streams


def test_partitions_of_two_ladders_cannot_be_compared(ladder: smkern.Ladder) -> None:
    other = smkern.ladder([16])
    with pytest.raises(PartitionError, match="different ladders"):
        ladder.split(decode=16).decode.disjoint(other.split(decode=16).prefill)
    assert not ladder.split(decode=16).decode.disjoint(ladder.split(decode=32).decode)
    assert ladder.split(decode=16).decode.disjoint(ladder.split(decode=32).prefill)


def test_inside_a_partition_its_stream_and_count_hold(ladder, machine: Machine) -> None:
    outside = machine.current
    decode, prefill = ladder.split(decode=16)
    with decode:
        assert current_num_sms() == 16
        with prefill:
            assert current_num_sms() == 116
            with decode:
                assert current_num_sms() == 16
            assert current_num_sms() == 116
        assert machine.current is decode.stream
    assert machine.current is outside
    assert current_num_sms() == 132


def test_an_error_inside_leaves_the_partition(ladder, machine: Machine) -> None:
    outside = machine.current
    with pytest.raises(ZeroDivisionError), ladder.split(decode=16).decode:
        _ = 1 // 0
    assert machine.current is outside


def test_leaving_a_partition_of_another_gpu_leaves_that_gpu(machine: Machine) -> None:
    decode, prefill = smkern.ladder([16], device=1).split(decode=16)
    with decode:
        assert machine.device == 1
        with prefill:
            assert machine.device == 1
        assert machine.device == 1
    assert machine.device == 0
    machine.device = 1
    with decode:
        pass
    assert machine.device == 1


def test_after_close_everything_raises(ladder, machine: Machine) -> None:
    decode, _prefill = ladder.split(decode=16)
    with decode.capture() as graph:
        pass
    graph.close()
    ladder.close()
    ladder.close()
    assert not machine.driver.contexts
    for use in (
        decode.__enter__,
        decode.capture().__enter__,
        decode.verify,
        decode.check_open,
        graph.replay,
        lambda: decode.launch(graph),
        lambda: ladder.split(decode=16),
    ):
        with pytest.raises(PartitionError, match="closed"):
            use()
    machine.current = FakeStream(decode.raw_stream)
    with pytest.raises(PartitionError, match="closed"):
        current_num_sms()


def test_close_inside_its_own_block_is_found_out(ladder, machine: Machine) -> None:
    decode = ladder.split(decode=16).decode
    with decode:
        ladder.close()
        with pytest.raises(PartitionError, match="leave its `with` block"):
            current_num_sms()
    assert machine.current.cuda_stream == 0


def test_close_refuses_while_a_graph_lives_and_closes_the_others(ladder, machine) -> None:
    decode = ladder.split(decode=16).decode
    with decode.capture() as graph:
        pass
    with pytest.raises(PartitionError, match=r"1 graphs captured on .*close them first"):
        ladder.close()
    assert [side.closed for split in ladder for side in split] == [False, True, True, True]
    assert len(machine.driver.contexts) == 1
    decode.launch(graph)
    graph.close()
    ladder.close()
    assert not machine.driver.contexts


def test_close_refuses_while_a_tensor_of_the_stream_lives(ladder, machine) -> None:
    decode = ladder.split(decode=16).decode
    machine.segments.append({"stream": decode.raw_stream, "allocated_size": 512})
    with pytest.raises(PartitionError, match=r"512 bytes of tensors .*free them first"):
        ladder.close()
    assert not decode.closed
    assert machine.budgets.budget(decode.raw_stream).num_sms == 16
    machine.segments[0]["allocated_size"] = 0
    ladder.close()
    assert decode.closed


def test_a_dropped_graph_does_not_hold_its_partition(ladder) -> None:
    with ladder.split(decode=16).decode.capture() as graph:
        pass
    del graph
    ladder.close()


def test_leaving_a_ladder_destroys_graphs_then_contexts(machine: Machine) -> None:
    with smkern.ladder([16]) as ladder:
        decode = ladder.split(decode=16).decode
        with decode.capture() as graph:
            pass
        machine.segments.append({"stream": decode.raw_stream, "allocated_size": 512})
    assert graph.closed
    assert decode.closed
    assert not machine.driver.contexts


def test_who_keeps_things_for_a_stream_hears_before_it_closes(ladder, machine) -> None:
    heard = []
    machine.budgets.at_close(lambda stream: heard.append((stream, len(machine.driver.contexts))))
    decode = ladder.split(decode=16).decode
    decode.close()
    assert heard == [(decode.raw_stream, 4)]


def test_a_graph_runs_on_its_own_partition_only(ladder, machine: Machine) -> None:
    decode, prefill = ladder.split(decode=16)
    with decode.capture() as graph:
        pass
    inner = graph._graph
    decode.launch(graph)
    assert inner.replayed_on == [decode.stream]
    with pytest.raises(PartitionError, match=r"captured on .*16 SMs.* not on .*116 SMs"):
        prefill.launch(graph)
    assert inner.replayed_on == [decode.stream]
    graph.replay()
    assert inner.replayed_on == [decode.stream, machine.current]


def test_a_capture_that_fails_holds_nothing(ladder) -> None:
    decode = ladder.split(decode=16).decode
    with pytest.raises(ZeroDivisionError), decode.capture():
        _ = 1 // 0
    decode.close()


def test_verify_tells_a_stray_cta(ladder, machine: Machine) -> None:
    decode = ladder.split(decode=16).decode
    replayed = {"smids": decode.smids}
    machine.patch.setattr(decode, "_replayed_smids", lambda num_ctas: replayed["smids"])
    decode.verify()
    machine.driver.strays = (70, 99)
    with pytest.raises(ConfinementError, match=r"launched eagerly .* SMs \[70, 99\], outside"):
        decode.verify()
    machine.driver.strays = ()
    replayed["smids"] = (*decode.smids, 70)
    with pytest.raises(ConfinementError, match=r"replayed from a graph .* SMs \[70\], outside"):
        decode.verify()
    replayed["smids"] = decode.smids[:12]
    with pytest.raises(ConfinementError, match="reached 12 of its 16 SMs"):
        decode.verify()


def test_verify_counts_the_sms_of_a_grid(machine: Machine) -> None:
    stray = 0
    machine.patch.setattr(machine.driver, "smids", lambda stream, n: list(range(n + stray)))
    decode = smkern.split(decode=16, backend="grid").decode
    decode.verify()
    stray = 1
    with pytest.raises(ConfinementError, match="16 CTAs launched eagerly ran on 17 SMs"):
        decode.verify()


def test_without_a_gpu_a_ladder_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for call in (smkern.ladder, lambda: smkern.split(decode=32), current_num_sms):
        with pytest.raises(DeviceError, match="sees no GPU"):
            call()
