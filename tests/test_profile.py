"""Profiles: what a GPU can do by SM count; whose curves they are; and never half-read."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern import profile as profiles
from smkern.device import DeviceInfo
from smkern.errors import DeviceError, ProfileError
from smkern.profile import Profile, load_profile, profile_for, save_profile, scaled
from tests import gpus

INFO = DeviceInfo("Some GPU", 108, (8, 0), 2, 2, 40 << 20, 1410, 80 << 30)
CURVE = ((8, 1.5), (16, 2.5), (24, 2.4), (108, 3.0))


def read(path):
    return profiles._read(path, "measured")


def profile(**curves) -> Profile:
    return Profile(INFO, {"bandwidth_tbps_spread_alone": CURVE, **curves}, {"date": "today"})


def test_the_shipped_profile_is_an_h200s():
    shipped = load_profile("h200")
    assert (shipped.info.name, shipped.info.num_sms) == ("NVIDIA H200", 132)
    assert shipped.bandwidth(16) > shipped.bandwidth(16, placement="default")
    assert shipped.bandwidth(16, beside=True) < shipped.bandwidth(16)
    assert shipped.flops(16) == pytest.approx(16 * 8.11, rel=0.01)


@given(st.integers(1, 131), st.sampled_from(["spread", "default"]), st.booleans())
def test_more_sms_are_never_less(num_sms, placement, beside):
    shipped = load_profile("h200")
    for rate in (shipped.bandwidth, shipped.flops):
        less = rate(num_sms, placement=placement, beside=beside)
        assert 0 < less <= rate(num_sms + 1, placement=placement, beside=beside)


def test_points_are_met_and_a_bad_choice_counts_as_the_one_before():
    assert profile().bandwidth(16) == 2.5
    assert profile().bandwidth(12) == 2.0
    assert profile().bandwidth(24) == 2.5
    assert profile().bandwidth(4) == 0.75


@pytest.mark.parametrize("num_sms", [0, -1, 109])
def test_counts_that_the_device_has_not(num_sms):
    with pytest.raises(ProfileError, match=r"1 to 108"):
        profile().bandwidth(num_sms)


def test_a_missing_curve_is_named_with_the_remedy():
    with pytest.raises(ProfileError, match=r"flops_tflops.*smkern bench ceilings"):
        profile().flops(8)


def test_a_saved_profile_comes_back(tmp_path):
    path = save_profile(profile(), tmp_path / "some.json")
    again = read(path)
    assert again == profile()
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 1}', json.dumps({"format": 99, "info": {}, "curves": {}})]
)
def test_what_is_no_profile_is_named_with_the_remedy(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=r"broken\.json.*smkern bench ceilings"):
        read(path)


def with_(**changes) -> dict:
    return {**json.loads((profiles.SHIPPED / "h200.json").read_text()), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"curves": [1]},
        {"curves": {"bandwidth_tbps_spread_alone": 3}},
        {"curves": {"bandwidth_tbps_spread_alone": [[8, "fast"]]}},
        {"curves": {"bandwidth_tbps_spread_alone": []}},
        {"curves": {"bandwidth_tbps_spread_alone": [[8, 0.0]]}},
        {"curves": {"bandwidth_tbps_spread_alone": [[0, 1.0]]}},
        {"info": {"name": "Some GPU"}},
        {"info": {"name": "Some GPU", "cores": 4, "capability": [9, 0]}},
        {"info": None},
    ],
    ids=str,
)
def test_a_foreign_part_is_corrupt(tmp_path, changes):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(with_(**changes)))
    with pytest.raises(ProfileError, match=r"broken\.json is corrupt.*smkern bench ceilings"):
        read(path)


@given(st.data())
def test_a_half_written_profile_is_refused(tmp_path_factory, data):
    whole = (profiles.SHIPPED / "h200.json").read_text().rstrip()
    path = tmp_path_factory.mktemp("half") / "half.json"
    path.write_text(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(ProfileError, match=r"half\.json is corrupt"):
        read(path)


def test_what_cannot_be_read_is_named_with_the_remedy(tmp_path):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ProfileError, match=r"folder\.json.*delete it"):
        read(tmp_path / "folder.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"binary\.json is corrupt"):
        read(binary)


@given(st.dictionaries(st.integers(1, 132), st.floats(0, 1e4), min_size=1), st.data())
def test_any_measurement_interpolates_without_a_fall(points, data):
    curve = tuple(sorted(points.items()))
    few = data.draw(st.integers(1, 131))
    more = data.draw(st.integers(few, 132))
    low, high = (profiles._interpolate(curve, n) for n in (few, more))
    assert 0 <= low <= high * (1 + 1e-12)
    assert high <= max(points.values()) * (1 + 1e-12)


def test_points_may_be_written_in_any_order(tmp_path):
    path = tmp_path / "some.json"
    shuffled = with_(curves={"bandwidth_tbps_spread_alone": [[16, 3.0], [8, 1.0]]})
    path.write_text(json.dumps(shuffled))
    assert read(path).bandwidth(8) == 1.0


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, broken):
    path = save_profile(profile(), tmp_path / "some.json")
    before = path.read_bytes()

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(f"os.{broken}", full)
    with pytest.raises(OSError, match="no space left"):
        save_profile(profile(flops_tflops_spread_alone=CURVE), path)
    assert path.read_bytes() == before
    assert list(tmp_path.glob(".*.part")) == []


def test_what_is_no_json_leaves_the_old_profile(tmp_path):
    path = save_profile(profile(), tmp_path / "some.json")
    with pytest.raises(TypeError):
        save_profile(Profile(INFO, {}, {"date": object()}), path)
    assert read(path) == profile()
    assert list(tmp_path.glob(".*.part")) == []


def test_an_unknown_name_lists_what_is_shipped():
    with pytest.raises(ProfileError, match="h200"):
        load_profile("h100")


def test_a_gpu_that_is_here_has_a_profile_by_its_name_too(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gpus.install(monkeypatch, gpus.A100)
    found = load_profile("a100-sxm4-80gb")
    assert (found.info, found.source) == (gpus.A100, "scaled")
    with pytest.raises(ProfileError, match="no profile h20"):
        load_profile("h20")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Where this user's profile of `INFO` would lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = profiles.cache_file(INFO)
    assert path.is_relative_to(tmp_path)
    return path


def rates(found: Profile, num_sms: int) -> list[float]:
    """Everything that a profile says of a count of SMs."""
    return [
        rate(num_sms, placement=placement, beside=beside)
        for rate in (found.bandwidth, found.flops)
        for placement in ("spread", "default")
        for beside in (False, True)
    ]


@pytest.mark.parametrize("info", gpus.FOREIGN, ids=gpus.by_name)
def test_a_gpu_that_nobody_measured_keeps_its_own_facts(info, own):
    found = profile_for(info)
    assert found.info == info
    assert (found.source, found.measured_on) == ("scaled", gpus.nearest(info).name)
    previous = [0.0] * 8
    for num_sms in range(1, info.num_sms + 1):
        now = rates(found, num_sms)
        assert min(now) > 0
        pairs = zip(previous, now, strict=True)
        assert all(less <= more * (1 + 1e-12) for less, more in pairs)
        previous = now
    assert {curve[-1][0] for curve in found.curves.values()} == {info.num_sms}
    for count in (0, info.num_sms + 1):
        with pytest.raises(ProfileError, match=f"1 to {info.num_sms}"):
            found.bandwidth(count)


@pytest.mark.parametrize("info", gpus.PARTS, ids=gpus.by_sms)
def test_a_part_of_a_gpu_has_its_bandwidth(info, own):
    """Whatever memory other GPUs have for as many SMs."""
    found, n = profile_for(info), info.num_sms // 2
    assert found.measured_on == info.name
    assert found.bandwidth(n) == pytest.approx(load_profile(gpus.by_name(info)).bandwidth(n))


@pytest.mark.parametrize("info", gpus.FOREIGN, ids=gpus.by_name)
def test_scaled_ceilings_stay_below_what_the_facts_allow(info, own):
    found = profile_for(info)
    total = info.num_sms
    peak = info.flops_per_clock * info.sm_clock_mhz * total / 1e6
    assert found.flops(total) <= peak
    assert found.flops(1) <= peak / total
    if info.memory_tbps:
        assert 0.5 * info.memory_tbps < found.bandwidth(total) < info.memory_tbps


@pytest.mark.parametrize(
    ("info", "tbps", "tflops"),
    [
        (gpus.H100_PCIE, (1.8, 2.04), (500, 820)),
        (gpus.H20, (3.3, 4.0), (100, 162)),
        (gpus.A100, (1.7, 2.04), (180, 312)),
        (gpus.L40S, (0.75, 0.864), (200, 366)),
        (gpus.B200, (6.0, 8.0), (1300, 2390)),
    ],
    ids=lambda value: gpus.by_name(value) if isinstance(value, DeviceInfo) else "",
)
def test_scaled_ceilings_are_of_the_gpus_own_order(info, tbps, tflops, own):
    found = profile_for(info)
    assert tbps[0] < found.bandwidth(info.num_sms) < tbps[1]
    assert tflops[0] < found.flops(info.num_sms) < tflops[1]


def test_few_sms_of_a_gpu_with_less_memory_bandwidth_fill_it():
    """An SM reads as fast as the H200's at the same clock, so fewer of them saturate: so it is."""
    h100, h200 = load_profile("h100-80gb-hbm3"), load_profile("h200")
    guessed = scaled(h100.info, h200)
    assert guessed.bandwidth(2) == pytest.approx(h200.bandwidth(2), rel=0.02)
    for num_sms in (12, 16, 24, 32, 48, 60, 84, 100, 116, 132):
        assert guessed.bandwidth(num_sms) == pytest.approx(h100.bandwidth(num_sms), rel=0.05)
    full = h100.bandwidth(132)
    assert h100.bandwidth(32) / full > h200.bandwidth(32) / h200.bandwidth(132)


def test_memory_that_nobody_tells_scales_with_the_sms(own):
    found = profile_for(gpus.UNKNOWN)
    assert found.bandwidth(200) == pytest.approx(load_profile("h200").bandwidth(132) * 200 / 132)


def test_the_nearest_is_of_the_same_architecture(own, tmp_path, monkeypatch):
    small = Profile(gpus.A100, {"bandwidth_tbps_spread_alone": ((108, 1.8),)}, source="shipped")
    save_profile(small, tmp_path / "shipped" / "a100-sxm4-80gb.json")
    save_profile(load_profile("h200"), tmp_path / "shipped" / "h200.json")
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path / "shipped")
    assert profile_for(INFO).measured_on == gpus.A100.name
    assert profile_for(gpus.H20).measured_on == gpus.H200.name


def test_a_shipped_profile_is_of_exactly_that_gpu(own):
    found = profile_for(gpus.H200)
    assert (found.source, found.measured_on, found.info) == ("shipped", "NVIDIA H200", gpus.H200)
    fewer = replace(gpus.H200, num_sms=66)
    assert (profile_for(fewer).source, profile_for(fewer).info) == ("scaled", fewer)
    assert profile_for(fewer).bandwidth(66) < found.bandwidth(132) * 1.01


def test_a_measured_profile_counts_before_the_shipped_one(own):
    assert profile_for(INFO).source == "scaled"
    save_profile(profile())
    assert own.exists()
    newer = replace(INFO, memory_tbps=2.0)
    found = profile_for(newer)
    assert (found.source, found.measured_on, found.info) == ("measured", "Some GPU", newer)
    assert found.bandwidth(16) == 2.5


@pytest.mark.parametrize(
    "other",
    [gpus.H200, replace(INFO, num_sms=100), replace(INFO, driver="9"), replace(INFO, name="x")],
    ids=["another GPU", "SMs", "driver", "name"],
)
def test_anothers_measurement_in_this_ones_place_is_refused_and_left(own, other):
    save_profile(Profile(other, profile().curves), own)
    before = own.read_bytes()
    with pytest.raises(ProfileError, match=r"was measured on .*this is 'Some GPU'.*delete it"):
        profile_for(INFO)
    assert own.read_bytes() == before


def test_another_driver_or_count_of_sms_is_another_file():
    names = {
        profiles.cache_file(x).name
        for x in (INFO, replace(INFO, driver="9"), replace(INFO, num_sms=100), gpus.H200)
    }
    assert len(names) == 4


def test_what_is_scaled_is_not_kept_as_if_measured(own):
    with pytest.raises(ProfileError, match=r"scaled from NVIDIA H200's.*ceilings --save"):
        save_profile(profile_for(INFO))
    assert not own.exists()


def test_scaling_to_itself_changes_nothing_on_the_points():
    known = load_profile("h200")
    again = scaled(known.info, known)
    for num_sms in range(1, 133):
        assert rates(again, num_sms) == pytest.approx(rates(known, num_sms))


def test_two_gpus_of_different_kinds_have_a_profile_each(own, monkeypatch):
    gpus.install(monkeypatch, gpus.H200, gpus.A100)
    assert load_profile().info == load_profile(0).info == gpus.H200
    second = load_profile(1)
    assert (second.info, second.source) == (gpus.A100, "scaled")
    with pytest.raises(DeviceError, match="no GPU 2: this machine has 0 to 1"):
        load_profile(2)


def test_without_a_gpu_plans_are_for_the_shipped_h200(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = load_profile()
    assert (found.info.name, found.source) == ("NVIDIA H200", "shipped")
